"""A part that does what it is told: `python fake_part.py RESULT DEVICE WHAT [WORDS ...]`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOREVER = 600.0


def main(result: str, device: str, what: str, *words: str) -> int:
    """Do it; results are written before anything goes wrong."""
    content = {"results": {"device": device, "what": what, "words": words, "at": time.time()}, "failed": None}
    if what != "wordless":
        Path(result).write_text(json.dumps(content))
    if what == "sleep":
        time.sleep(float(words[0]))
        content["results"]["ended"] = time.time()  # type: ignore[index]
        Path(result).write_text(json.dumps(content))
    elif what == "fork and hang":
        for own_session in (False, True):
            call = [sys.executable, "-c", f"import time; time.sleep({FOREVER})"]
            child = subprocess.Popen(call, start_new_session=own_session)
            with Path(words[0]).open("a") as file:
                file.write(f"{child.pid}\n")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(FOREVER)
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "wordless":
        sys.exit("ImportError: libcuda.so.1: the driver is too old\n")
    elif what == "failed":
        content["failed"] = "the sum is wrong"
        Path(result).write_text(json.dumps(content))
        return 1
    elif what == "keep":
        for number in range(int(words[0])):
            (Path(os.environ["GPU_KIT_KEEP"]) / f"{number}.bin").write_bytes(bytes(int(words[1])))
            time.sleep(0.01)  # so that it is known which is newer
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
