"""`transformers serve` with Flint registered, in a process of its own, and an OpenAI client.

What it needs belongs to the extra `test`: where it is missing these tests fail, they do not skip.
"""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import APIError, OpenAI
from transformers_support import TEXTS, folder, library_tokens, tokenizer

DOCUMENTED_CHAT = [{"role": "user", "content": "def main():"}]
START_SECONDS = 120  # only a server that does not come up waits so long


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Of a server that serves flint-tiny from its GGUF file; both are gone afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "flint_kernels.integrations.transformers", "serve"]
    options = ["flint-tiny", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path_factory.mktemp("serve") / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, *options], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            opener.open(address, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"the server did not come up:\n{log.read_text(encoding='utf-8')}")


def prompt_and_answer(count: int) -> tuple[str, str]:
    """A message, and what the library goes on with after its chat template."""
    message = TEXTS[0].rstrip()
    chat = [{"role": "user", "content": message}]
    prompt = tokenizer().apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return message, tokenizer().decode(library_tokens("flint-tiny", prompt, count))


def test_it_lists_the_model(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == folder("flint-tiny")


def test_a_chat_completion_streams_the_librarys_tokens(client: OpenAI) -> None:
    message, want = prompt_and_answer(40)
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": message}],
        max_tokens=40,
        temperature=0,
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in stream]
    pieces = [choice.delta.content for choice in choices if choice.delta.content]
    assert len(pieces) > 5
    assert "".join(pieces) == want
    assert choices[-1].finish_reason == "length"


def test_a_whole_answer_and_a_plain_completion(client: OpenAI) -> None:
    message, want = prompt_and_answer(20)
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": message}],
        max_tokens=20,
        temperature=0,
    )
    assert answer.choices[0].message.content == want
    assert answer.usage is not None and answer.usage.completion_tokens == 20
    plain = client.completions.create(model=model, prompt=TEXTS[1], max_tokens=20, temperature=0)
    assert plain.choices[0].text == tokenizer().decode(library_tokens("flint-tiny", TEXTS[1], 20))


def test_the_documented_client_runs(
    client: OpenAI, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = Path(__file__).parents[1] / "docs" / "transformers.md"
    [code] = re.findall(r"^```py\n(.*?)^```$", document.read_text("utf-8"), re.DOTALL | re.M)
    address = "http://localhost:8000/v1"
    assert address in code
    script = tmp_path / "client.py"
    script.write_text(code.replace(address, str(client.base_url)), encoding="utf-8")
    runpy.run_path(str(script))
    prompt = tokenizer().apply_chat_template(DOCUMENTED_CHAT, tokenize=False)
    want = tokenizer().decode(library_tokens("flint-tiny", prompt, 40))
    assert capsys.readouterr().out == want


def test_sampling_by_a_seed(client: OpenAI) -> None:
    answers = {
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "class A:"}],
            max_tokens=16,
            seed=seed,
        )
        .choices[0]
        .message.content
        for seed in (1, 1, 2)
    }
    assert len(answers) == 2


def test_what_cannot_be_done_reaches_the_client(client: OpenAI) -> None:
    with pytest.raises(APIError):
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "class A:"}],
            extra_body={"generation_config": '{"cache_implementation": "offloaded"}'},
        )
