"""Answers of a judge that are no verdict, and its URL."""

import pytest

from slimrl.rewards.http import EndpointError
from slimrl.rewards.judge import Judge, Pairwise
from slimrl.rewards.process import ProcessReward
from slimrl.rewards.verdict_line import score_form
from slimrl.rewards.verdicts import Judges, NoVerdict

JUDGE = {"model": "judge", "rubric": "It is short."}


class Endpoint:
    """Gives one answer."""

    url = "http://127.0.0.1:9/v1"

    def __init__(self, choice):
        self._answer = {"choices": [choice]}

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
