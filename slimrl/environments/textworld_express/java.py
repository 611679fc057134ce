"""One Java machine that several processes use: each connects to it and has games of its own there.

It listens at a port of this machine and answers whoever knows a secret, which py4j draws and tells its starter alone.
"""

import os
import select
import shutil
import subprocess
from contextlib import suppress

from py4j.java_gateway import GatewayParameters, JavaGateway, find_jar_path
from textworld_express.constants import BASEPATH, JAR_PATH

PROGRAM = "java"
OPTIONS = (
    # Little memory, and a start in little time: a game needs no more.
    "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xss512k", "-Xmx2g",
    # Without memory it would answer some and not others.
    "-XX:+ExitOnOutOfMemoryError",
    # No file in /tmp, and none beside the package.
    "-XX:-UsePerfData", "-XX:ErrorFile=/dev/stderr",
)  # fmt: skip
READY_S = 60.0
END_S = 10.0


class Java:
    """A Java machine that runs until `close`, or until this process and those that it forked have ended: then its
    standard input ends.

    Raises:
        ValueError: there is no Java, or it does not start.
    """

    def __init__(self) -> None:
        find_java()
        jars = os.pathsep.join((find_jar_path(), JAR_PATH))
        self._process = subprocess.Popen(
            [PROGRAM, *OPTIONS, "-classpath", jars, "py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=BASEPATH,  # where the games read their things
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        in_time = select.select([self._process.stdout], [], [], READY_S)[0]
        port = self._process.stdout.readline().strip() if in_time else ""
        if not port.isdecimal():
            self.close()
            raise ValueError(f"{PROGRAM} does not start (exit code {self._process.returncode}): {port}".rstrip(": "))
        self._port, self._secret = int(port), self._process.stdout.readline().strip()
        self._process.stdout.close()  # what games print is lost

    def connect(self) -> JavaGateway:
        """A connection of this process's own. Closing it does not free the objects that were made through it."""
        return JavaGateway(gateway_parameters=GatewayParameters(port=self._port, auth_token=self._secret))

    def close(self) -> None:
        """End it. Only where it was started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def find_java() -> None:
    """Raises ValueError: there is no Java."""
    if shutil.which(PROGRAM) is None:
        raise ValueError(
            f"there is no {PROGRAM} on PATH; Debian's is installed by `apt-get install default-jre-headless`"
        )
