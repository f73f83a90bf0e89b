"""Interpreters that have imported verl's dependencies, but neither verl nor the plugin.

The import of torch and transformers takes most of the start time of a process. One server imports them once in a
session of pytest and forks: for code in a new interpreter, for ranks, and for Ray's workers.
"""

import atexit
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

# Without Ray, which reads environment variables at import.
MODULES = """
accelerate codetiming datasets fastapi google.protobuf.reflection hydra jsonschema msgspec numpy nvtx pandas peft
requests tensordict torch torch._functorch.aot_autograd torch.distributed.checkpoint torch.distributed.fsdp
torchdata.stateful_dataloader transformers.modeling_utils uvicorn zmq
"""
Ended = subprocess.CompletedProcess[str]


@functools.cache
def python() -> str:
    """Path of a command that runs a script, ``-m MODULE`` or ``-c CODE``, like ``python``."""
    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)
    folder = temporary.name
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        server = [sys.executable, "-W", "ignore", __file__, "serve", str(listener.fileno())]
        # The server ends with its stdin, which ends with this process.
        subprocess.Popen(server, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    client = shlex.join([sys.executable, "-I", "-S", __file__, "request", f"{folder}/socket"])
    command = Path(folder, "python")
    command.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    command.chmod(0o755)
    return str(command)


def run_fresh(cases: Sequence[tuple[str, dict[str, str]]]) -> list[Ended]:
    """Run each case, code and environment variables, in a new process."""
    ended = []
    for code, variables in cases:
        command, variables = [python(), "-c", textwrap.dedent(code)], {**os.environ, **variables}
        ended.append(subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280))
    return ended


def request_fork(path: str, arguments: list[str]) -> int:
    """Let the server fork with this process's files, folder and variables; returns the exit code."""
    files = [int(name) for name in os.listdir("/dev/fd")]
    files = [number for number in files if os.path.exists(f"/dev/fd/{number}")]  # without the listing's own file
    request = {"arguments": arguments, "files": files, "folder": os.getcwd(), "variables": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"\n"], files)
        server.sendall(json.dumps(request).encode() + b"\n")
        return (server.recv(1) or b"\1")[0]


def serve(listener: socket.socket) -> None:
    """Fork for each client until stdin ends."""
    del sys.path[0]  # the folder of this file
    for name in MODULES.split():
        __import__(name)
    # Imports the configs that verl imports in every process with a model.
    sys.modules["transformers"].AutoModelForImageTextToText._model_mapping.keys()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            _attend(client)
        client.close()


def _attend(client: socket.socket) -> None:
    """Run a client's request; kill the process if the client ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, *_ = socket.recv_fds(client, 1, 253)
    request = json.loads(client.makefile().readline())
    process = os.fork()
    if not process:
        client.close()
        _run(files, **request)
    for number in files:
        os.close(number)
    if client in select.select([client, os.pidfd_open(process)], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    else:
        client.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) % 256]))
    os._exit(0)


def _run(received: list[int], arguments: list[str], files: list[int], folder: str, variables: dict[str, str]) -> None:
    apart = [fcntl.fcntl(number, fcntl.F_DUPFD, 512) for number in received]
    for number in received:
        os.close(number)
    for number, copy in zip(files, apart, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    while not (arguments[0] in ("-c", "-m") or arguments[0].endswith(".py")):  # drop the interpreter's flags
        arguments = arguments[1:]
    code = 0
    try:
        if arguments[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *arguments[2:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        elif arguments[0] == "-m":
            sys.path.insert(0, folder)
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(arguments[0]))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        sys.exit(request_fork(sys.argv[2], sys.argv[3:]))
