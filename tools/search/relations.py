"""What is known of people, companies, towns, schools and books, and how passages and questions say it."""

from dataclasses import dataclass

YEAR = "year"
"""Kind of a value that is a year, not an entity."""


@dataclass(frozen=True, kw_only=True)
class Relation:
    """Something that each entity of a kind has exactly one of."""

    of: str
    value: str
    """Kind of what it leads to"""
    question: str
    """`{}` stands for a name, or for `inner` of another relation."""
    sentences: tuple[str, ...]
    """`{s}` is the subject (a name or pronoun), `{v}` the value."""
    inner: str = ""
    """What leads to the value, within a question; empty for years"""
    earlier: str = ""
    """Question which of two came first; for years"""


RELATIONS = {
    "birthplace": Relation(
        of="person", value="town", question="In which town was {} born?", inner="the town where {} was born",
        sentences=("{s} was born in {v}.", "{s} came into the world in {v}.", "{s} is a native of {v}.",
                   "{v} was the childhood home and birthplace."),
    ),
    "born": Relation(
        of="person", value=YEAR, question="In which year was {} born?", earlier="Who was born first, {} or {}?",
        sentences=("The parish books give {v} as the year of birth.", "{s} was born in the year {v}.",
                   "{s} first saw the light of day in {v}."),
    ),
    "employer": Relation(
        of="person", value="company", question="Which company does {} work for?", inner="the company that {} works for",
        sentences=("{s} works for {v}.", "{s} has had a post at {v} ever since.", "{s} is on the payroll of {v}.",
                   "{s} earns a living at {v}."),
    ),
    "teacher": Relation(
        of="person", value="person", question="Who was the teacher of {}?", inner="the teacher of {}",
        sentences=("{s} learned the trade from {v}.", "{s} was a pupil of {v}.", "The lessons of {v} were decisive.",
                   "{s} was taught by {v}."),
    ),
    "school": Relation(
        of="person", value="school", question="At which school did {} study?", inner="the school where {} studied",
        sentences=("{s} studied at {v}.", "{s} graduated from {v}.", "{s} spent four years at {v}."),
    ),
    "founder": Relation(
        of="company", value="person", question="Who founded {}?", inner="the founder of {}",
        sentences=("{s} was founded by {v}.", "{v} set up the firm.", "{s} goes back to {v}.",
                   "{s} was started in a shed by {v}."),
    ),
    "seat": Relation(
        of="company", value="town", question="In which town does {} have its seat?",
        inner="the town where {} has its seat",
        sentences=("{s} has its seat in {v}.", "The head office is in {v}.", "{s} is run from {v}."),
    ),
    "owner": Relation(
        of="company", value="company", question="Which company owns {}?", inner="the company that owns {}",
        sentences=("{s} belongs to {v}.", "{s} was bought by {v}.", "All shares are held by {v}."),
    ),
    "founded": Relation(
        of="company", value=YEAR, question="In which year was {} founded?",
        earlier="Which company was founded first, {} or {}?",
        sentences=("{s} was founded in {v}.", "{s} opened its doors in {v}.", "The first ledger is of {v}."),
    ),
    "mayor": Relation(
        of="town", value="person", question="Who is the mayor of {}?", inner="the mayor of {}",
        sentences=("The mayor is {v}.", "{s} is governed by {v}.", "{v} presides over the town council."),
    ),
    "namesake": Relation(
        of="town", value="person", question="After whom is {} named?", inner="the person after whom {} is named",
        sentences=("{s} is named after {v}.", "The name honours {v}.", "{s} was renamed in memory of {v}."),
    ),
    "charter": Relation(
        of="town", value=YEAR, question="In which year did {} get its charter?",
        earlier="Which town got its charter first, {} or {}?",
        sentences=("{s} got its charter in {v}.", "{s} has been a town since {v}.", "Town rights were granted in {v}."),
    ),
    "place": Relation(
        of="school", value="town", question="In which town does {} stand?", inner="the town where {} stands",
        sentences=("{s} stands in {v}.", "The buildings are in {v}.", "{s} has its campus on a hill in {v}."),
    ),
    "head": Relation(
        of="school", value="person", question="Who is the head of {}?", inner="the head of {}",
        sentences=("{s} is headed by {v}.", "{v} has been in charge for years.", "The present head is {v}."),
    ),
    "author": Relation(
        of="book", value="person", question="Who wrote {}?", inner="the author of {}",
        sentences=("{s} was written by {v}.", "{v} is the author.", "{s} is the best known work of {v}."),
    ),
    "publisher": Relation(
        of="book", value="company", question="Which company published {}?", inner="the publisher of {}",
        sentences=("{s} was published by {v}.", "{s} came out with {v}.", "{v} printed the first edition."),
    ),
    "published": Relation(
        of="book", value=YEAR, question="In which year was {} published?",
        earlier="Which book was published first, {} or {}?",
        sentences=("{s} was published in {v}.", "{s} appeared in {v}.", "The first edition is of {v}."),
    ),
}  # fmt: skip

SHARES = {"person": 0.6, "company": 0.15, "town": 0.15, "school": 0.04, "book": 0.06}
"""Kind -> its share of the passages"""

INTRODUCTIONS = {
    "person": ("{n} is a {w}.", "{n}, a {w}, led an uneventful life.", "The {w} {n} is remembered locally."),
    "company": ("{n} is a firm of {w} people.", "{n} is a company with a long history.", "{n} is known abroad."),
    "town": ("{n} is a town with {w} inhabitants.", "{n} lies on a river.", "{n} is a small town."),
    "school": ("{n} is a school of {w} pupils.", "{n} has a good name.", "{n} is an old school."),
    "book": ("{n} is a novel in {w} chapters.", "{n} is a book of stories.", "{n} is a novel."),
}
TRADES = ("carpenter", "surveyor", "printer", "botanist", "clerk", "mechanic", "painter", "lawyer", "glazier", "pilot")
FILLERS = (
    "Little else is written down about it.",
    "The archives were lost in a fire.",
    "A street was later named in memory of that.",
    "Visitors are still told the story.",
    "Accounts of the following years differ.",
)
CONFUSED = ("{n} should not be confused with {o}.", "Letters meant for {o} often arrive here.",
            "The name is easily mistaken for that of {o}.")  # fmt: skip
