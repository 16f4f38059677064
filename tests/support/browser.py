"""A browser without a window: pages at a width and in a colour scheme, by Chromium's protocol."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Chromium reads commands from the file of number 3, and answers to that of 4.
PIPE_LAUNCHER = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for pipe, number in zip(pipes, (3, 4)):
    os.dup2(pipe, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_chromium():
    """Its command; None where there is none."""
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@contextlib.contextmanager
def open_browser(profile):
    """A `Browser`; what it remembers is in the folder `profile`."""
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    command = [
        find_chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
    ]
    command += ["--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", PIPE_LAUNCHER, str(read_commands), str(write_answers), *command],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    with (
        open(commands, "wb", buffering=0) as command_pipe,
        open(answers, "rb", buffering=0) as answer_pipe,
    ):
        try:
            yield Browser(command_pipe, answer_pipe)
        finally:
            process.terminate()
            process.wait(30)


class Browser:
    """One page of it."""

    def __init__(self, commands, answers):
        self._commands, self._answers = commands, answers
        self._message_id, self._buffer, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method, **params):
        """A command of the protocol: -> its result. RuntimeError where it has none."""
        self._message_id += 1
        message = {"id": self._message_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read_message()).get("id") != self._message_id:
            pass
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def open(self, path, *, width, height=900, scheme="light"):
        """A file, once its pictures are there."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while self._read_message().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression):
        """What an expression of JavaScript is, or is in the end."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        response = self.call("Runtime.evaluate", **params)
        if "exceptionDetails" in response:
            raise RuntimeError(response["exceptionDetails"])
        return response["result"].get("value")

    def screenshot(self, path, *, full_page=False):
        """As a PNG: of what is in view, or of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=full_page)
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    def _read_message(self):
        while b"\0" not in self._buffer:
            chunk = os.read(self._answers.fileno(), 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
