"""Answers of a judge that are no verdict, its URL, and verdicts that are kept in a file."""

import pytest

from slimrl.rewards.http import EndpointError
from slimrl.rewards.judge import Judge, Pairwise
from slimrl.rewards.process import ProcessReward
from slimrl.rewards.verdict_line import score_form
from slimrl.rewards.verdicts import Judges, NoVerdict

JUDGE = {"model": "judge", "rubric": "It is short."}


class Endpoint:
    """Gives one answer."""

    def __init__(self, choice, url="http://127.0.0.1:9/v1"):
        self._answer, self.url = {"choices": [choice]}, url

    async def start(self):
        pass

    async def post(self, path, request):
        return self._answer

    async def close(self):
        pass


async def verdict(choice):
    judges = Judges(Endpoint(choice), model="judge", options={}, cache="")
    try:
        return await judges.start("Which score?", score_form(10))
    finally:
        await judges.close()


MESSAGE = {"message": {"content": "Short.\nSCORE: 7"}}


@pytest.mark.parametrize("choice", [MESSAGE, {**MESSAGE, "finish_reason": None}, {**MESSAGE, "finish_reason": ""}])
async def test_an_answer_that_does_not_say_why_it_ended_is_no_verdict(choice):
    with pytest.raises(EndpointError, match=r"^the judge's answer has no finish_reason, which says whether"):
        await verdict(choice)
    assert await verdict({**choice, "finish_reason": "stop"}) == "SCORE: 7"
    with pytest.raises(NoVerdict, match="ran out of max_tokens"):
        await verdict({**choice, "finish_reason": "length"})


@pytest.mark.parametrize(
    ("made", "path", "given"),
    [
        (Judge, "/chat/completions", JUDGE),
        (Pairwise, "/chat/completions", JUDGE),
        (ProcessReward, "/pooling", {"model": "judge"}),
    ],
)
@pytest.mark.parametrize("end", ["", "/"])
def test_a_url_with_the_path_that_is_added_is_refused_with_the_one_to_write(made, path, given, end):
    url = f"http://127.0.0.1:9/v1{path}{end}"
    with pytest.raises(ValueError, match=rf"^url: {url} ends with {path}, which .* Write http://127\.0\.0\.1:9/v1$"):
        made(url=url, **given)
    made(url="http://127.0.0.1:9/v1/", **given)


async def test_runs_that_share_a_file_of_verdicts_do_not_get_those_of_another_server(tmp_path):
    given = []
    for host, said in [("a", "SCORE: 7"), ("b", "SCORE: 3"), ("a", "SCORE: 5")]:
        endpoint = Endpoint({"message": {"content": said}, "finish_reason": "stop"}, url=f"http://{host}/v1")
        judges = Judges(endpoint, model="judge", options={}, cache=str(tmp_path / "verdicts.sqlite"))
        await judges.start("Which score?", score_form(10))
        given.append(await judges.verdict("Is it short?", score_form(10)))
        await judges.close()
    assert given == [7.0, 3.0, 7.0]
