"""A taskset of the verifiers library, for a test: a word is to be written backwards."""

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordsData(vf.TaskData):
    answer: str


class WordsTask(vf.Task[WordsData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class WordsConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("apple", "berry")


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    def load(self) -> list[WordsTask]:
        return [
            WordsTask(WordsData(prompt=f"Write {word} backwards.", answer=word[::-1]), self.config.task)
            for word in self.config.words
        ]
