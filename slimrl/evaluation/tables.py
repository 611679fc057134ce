"""Evaluations as tables for a terminal."""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table

from slimrl.data.trajectory import Status
from slimrl.evaluation.answer_rows import AnswerRow, answer_of
from slimrl.evaluation.comparison import SetComparison
from slimrl.evaluation.item import Item
from slimrl.evaluation.ratings import BOUND, PairResult, Rating
from slimrl.evaluation.result import SetResult
from slimrl.observability.terminal import plain_console

PIPED_COLUMNS = 120


def print_results(results: Sequence[SetResult]) -> None:
    """What was measured, then the trajectories, their turns and their tools, as far as there are any."""
    means, trajectories, turns, tools = [], [], [], []
    for result in results:
        counts = [result.name, str(result.num_prompts), str(result.samples_per_prompt)]
        means += [
            [*counts, _title(measure), f"{mean:.3f}", _range(result.intervals[measure])]
            for measure, mean in _shown(result.means).items()
        ]
        fractions = (result.truncated_fraction, result.aborted_fraction, result.failed_fraction)
        figures = (result.turns_mean, result.tool_calls_mean, result.tokens_mean)
        trajectories.append(
            [result.name, *(f"{figure:.2f}" for figure in figures), *(f"{fraction:.1%}" for fraction in fractions)]
        )
        turns += [
            [result.name, str(row.turn), str(row.reached), str(row.ended), _number(row.reward_mean),
             f"{row.tokens_mean:.1f}"]
            for row in result.turns
        ]  # fmt: skip
        tools += [
            [result.name, name, str(row.calls), str(row.errors), str(row.malformed)]
            for name, row in result.tools.items()
        ]
    _print(("set", "prompts", "samples", "measure", "mean", "95% interval"), means)
    _print(("set", "turns", "tool calls", "tokens", "truncated", "aborted", "failed"), trajectories)
    _print(("set", "turn", "reached", "ended", "reward", "tokens"), turns)
    _print(("set", "tool", "calls", "errors", "malformed"), tools)


def print_comparison(comparisons: Iterable[SetComparison]) -> None:
    rows = [
        [one.name, str(one.num_prompts), _title(measure), f"{pair.a:.3f}", f"{pair.b:.3f}", f"{pair.difference:+.3f}",
         _range(pair.interval, "+"), str(pair.better), str(pair.worse)]
        for one in comparisons
        for measure, pair in _shown(one.measures).items()
    ]  # fmt: skip
    _print(("set", "prompts", "measure", "A", "B", "B - A", "95% interval", "better", "worse"), rows)


def print_ratings(rows: Sequence[Rating], totals: Mapping[str, PairResult]) -> None:
    """Ratings with their intervals, and the games of each player by its name."""
    shown = []
    for row in rows:
        at_end = "> " if row.elo >= BOUND else "< " if row.elo <= -BOUND else ""
        total = totals[row.name]
        counts = (total.games, total.wins, total.draws, total.losses)
        interval = f"{row.low:+.0f} to {row.high:+.0f}" if row.low < row.high else ""
        shown.append([row.name, f"{at_end}{row.elo:+.0f}", interval, *map(str, counts)])
    _print(("player", "Elo", "95% interval", "games", "won", "drawn", "lost"), shown)


def print_answers(rows: Iterable[AnswerRow]) -> None:
    """Questions with both answers and their rewards; long texts go on in further lines."""
    titles = ("set", "question", "answer in A", "reward", "answer in B", "reward")
    texts = [[row.set, " ".join(row.question.split()), *_answered(row.a), *_answered(row.b)] for row in rows]
    _print(titles, texts)


def _answered(item: Item) -> tuple[str, str]:
    """The answer in one line, with `...` where it was cut off, and its reward."""
    cut = " ..." if item.status is Status.truncated else ""
    return " ".join(answer_of(item).split()) + cut, f"{item.reward:g}"


def _print(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Text to the left, numbers to the right; a name only where it changes. Nothing without rows."""
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in titles:
        wraps = title == "question" or title.startswith("answer")
        left = wraps or title in ("set", "measure", "tool")
        table.add_column(title, justify="left" if left else "right", no_wrap=not wraps, overflow="fold")
    named = ""
    for row in rows:
        repeated = len([title for title in titles[:3] if title in ("set", "prompts", "samples")]) * (row[0] == named)
        table.add_row(*[""] * repeated, *row[repeated:])
        named = row[0]
    console = plain_console(soft_wrap=False, piped_columns=PIPED_COLUMNS)
    console.print(table)
    console.print()


def _shown[T](measures: dict[str, T]) -> dict[str, T]:
    """The accuracy stands for the mean reward, which it equals."""
    return {name: value for name, value in measures.items() if name != "reward_mean" or "accuracy" not in measures}


def _title(measure: str) -> str:
    if measure == "reward_mean":
        return "mean reward"
    return measure.replace("pass_at_", "pass@").replace("parts/", "part ")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _range(ends: tuple[float, float], sign: str = "") -> str:
    low, high = (f"{end:{sign}.3f}" for end in ends)
    return f"{low} to {high}"
