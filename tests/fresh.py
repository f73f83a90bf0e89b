"""Code in interpreters of its own, each of which has imported what verl needs, but neither verl nor the plugin.

Importing torch, transformers and Ray takes most of the seconds of a new interpreter, so one imports them and forks.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence

_SERVER = """
import json, os, sys, tempfile
import accelerate, hydra, numpy, pandas, peft, ray, tensordict, torch, transformers.modeling_utils
answers = []
for code, environment in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(environment)
            status = 1
            try:
                exec(compile(code, "case", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        answers.append([os.waitstatus_to_exitcode(status), out.read().decode(), err.read().decode()])
json.dump(answers, sys.stdout)
"""


Ended = subprocess.CompletedProcess[str]


def run_fresh(cases: Sequence[tuple[str, dict[str, str]]]) -> list[Ended]:
    """Run every case, code and environment variables, in a process of its own."""
    request = json.dumps([(textwrap.dedent(code), environment) for code, environment in cases])
    server = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        input=request,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ,
        check=True,
    )
    return [Ended([], *answer) for answer in json.loads(server.stdout)]
