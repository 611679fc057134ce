"""The repository of a task in a container of its image: commands there, what they changed, and the run of the tests.

All is done by bash and git of the image, whose HEAD may be a commit of its own above the task's base commit, and whose
folder may hold files that git neither knows nor ignores. So a change is the difference of two trees, both of all files
that git does not ignore: one of the start and one of the end.
"""

import base64
import binascii
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace

from slimrl.agent.sandbox.interface import Ended, Language, Program, Result, SandboxError, Session, check_code
from slimrl.agent.sandbox.tools import answer
from slimrl.config.schema.agent import SandboxLimits
from slimrl.environments.software_repair.tools import EDIT

FOLDER = "/testbed"
"""Where SWE-bench's images have the repository"""
GIT_S = 120.0
"""Deadline of what git does"""
MARGIN_S = 15.0
"""How much later than a command's own deadline the container is given up"""
ANSWER_BYTES = 64 * 1024
"""Longest output of a command that the policy gets; the rest of it is cut off."""
PATCH_BYTES = 16 * 1024**2
"""Longest change that is read, in base64"""
LOG_BYTES = 64 * 1024**2
"""Longest log of the tests"""
_TRUSTED = f"git config --global --add safe.directory {FOLDER}"
_TREE = """
export GIT_INDEX_FILE=$(mktemp)
cp "$(git rev-parse --git-dir)/index" "$GIT_INDEX_FILE" && git add --all >/dev/null 2>&1 && git write-tree
"""
_DIFF = "git diff --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv"
_ENTER = f"cd {FOLDER} || exit 1"
# The output goes into a file: a process that is left in the background would keep a pipe open. The files that bash
# reads at its start are those of an interactive one in the image, where they activate the repository's environment.
_COMMAND = """
{enter}
command=$(cat)
output=$(mktemp)
[ -f ~/.bashrc ] && source ~/.bashrc >/dev/null 2>&1
timeout --signal=KILL {seconds} bash -c "$command" >"$output" 2>&1 </dev/null
status=$?
head -c {characters} "$output"
rm -f "$output"
exit $status
"""
_KILLED = 137


class Repository:
    """A session in a container of the task's image. All methods raise SessionEnded once that is gone."""

    def __init__(self, session: Session, limits: SandboxLimits) -> None:
        self._session, self._limits = session, limits
        self._tree = ""

    async def start(self) -> None:
        """Note the files as they are. Raises SandboxError: the image has no repository of git."""
        result = await self._bash(f"{_ENTER}; {_TRUSTED}; {_TREE}", GIT_S)
        self._tree = result.stdout.strip()
        if result.ended is not Ended.ok or not self._tree:
            raise SandboxError(f"the image has no git repository in {FOLDER}: {result.stderr.strip()}")

    async def run(self, command: str, timeout_s: float) -> str:
        """What a command of bash says, with all that it writes. Raises ValueError for one that is too long."""
        check_code(command)
        code = _COMMAND.format(enter=_ENTER, seconds=timeout_s, characters=ANSWER_BYTES)
        result = await self._bash(code, timeout_s + MARGIN_S, command.encode())
        said = answer(result)
        late = result.exit_status == _KILLED and result.seconds >= timeout_s
        return f"{said}\nstopped: it ran for {timeout_s:g} s" if late else said

    async def edit(self, path: str, old: str, new: str) -> str:
        given = json.dumps({"path": path, "old": old, "new": new}).encode()
        return answer(await self._bash(f"{_ENTER}; exec python3 -I -c {shlex.quote(EDIT)}", GIT_S, given))

    async def changes(self) -> bytes:
        """A binary diff from the start to now. Raises SandboxError: git cannot make it, or it is too long."""
        code = f'{_ENTER}; set -o pipefail; now=$({_TREE}) && {_DIFF} {self._tree} "$now" | base64 -w 0'
        result = await self._bash(code, GIT_S, output_bytes=PATCH_BYTES)
        if result.ended is not Ended.ok:
            raise SandboxError(f"the changes cannot be read ({result.ended.value}): {result.stderr.strip()}")
        try:
            return base64.b64decode(result.stdout, validate=True)
        except binascii.Error as error:
            raise SandboxError("the changes cannot be read: no base64") from error

    async def apply(self, patch: bytes, options: Sequence[str]) -> bool:
        """Whether git could apply a diff."""
        code = f"{_ENTER}; {_TRUSTED}; git apply --whitespace=nowarn {shlex.join(options)} -"
        return (await self._bash(code, GIT_S, patch)).ended is Ended.ok

    async def evaluate(self, script: str, timeout_s: float) -> Result:
        """Run an eval script. Its stdout has both streams in their order, as the lines that tell the tests' part are
        of bash's trace."""
        code = "cat > /eval.sh && exec /bin/bash /eval.sh 2>&1 </dev/null"
        return await self._bash(code, timeout_s, script.encode(), output_bytes=LOG_BYTES)

    async def _bash(
        self, code: str, timeout_s: float, stdin: bytes = b"", output_bytes: int = 2 * ANSWER_BYTES
    ) -> Result:
        limits = replace(self._limits, wall_s=timeout_s, output_bytes=output_bytes)
        return await self._session.run_program(Program(code=code, language=Language.shell, stdin=stdin), limits)
