"""`kvrelay generate`: send one prompt, stream the answer."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterable

import grpc

from kvrelay.cli import client
from kvrelay.cli.identity import Identity
from kvrelay.cli.progress import PrefillLine
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.text_file import read_text
from kvrelay.proto.v1 import common_pb2, inference_pb2, inference_pb2_grpc


def run(options: argparse.Namespace) -> int:
    """Return 0 when the request finished; otherwise print the status on stderr and return 1."""
    request = build_request(options)
    with client.connect(options.endpoint, Identity.of(options)) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=options.timeout_s)
        try:
            finished = _print_json(call) if options.json else _print_text(call)
        except grpc.RpcError as err:
            status, text = client.error_of(err)
            print(f"{status}: {text}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            call.cancel()
            return 130
    if not finished:
        print("UNKNOWN: the stream ended before the request did", file=sys.stderr)
    return 0 if finished else 1


def build_request(options: argparse.Namespace) -> inference_pb2.GenerateRequest:
    """Return the request that the options describe.

    Raises:
        InvalidRequestError: a file is missing or is not what it should be, a number cannot be sent, or an option would
            show nothing.
    """
    request = inference_pb2.GenerateRequest(sampling=_sampling(options))
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(options, name) and not options.json:
            raise InvalidRequestError(f"--{name.replace('_', '-')} shows nothing without --json")
    if options.token_ids is not None:
        request.tokens.CopyFrom(_token_ids(options.token_ids))
        return request
    text = options.text if options.text is not None else _read(options.prompt_file)
    if options.chat or options.system is not None:
        if options.system is not None:
            request.chat.messages.add(role="system", content=options.system)
        request.chat.messages.add(role="user", content=text)
    else:
        request.text = text
    return request


def _sampling(options: argparse.Namespace) -> common_pb2.Sampling:
    for name, limit in (("max_tokens", 2**32), ("seed", 2**64), ("logprobs", 2**32)):
        value = getattr(options, name)
        if value is not None and not 0 <= value < limit:
            raise InvalidRequestError(f"--{name.replace('_', '-')} {value} is not in [0, {limit})")
    return common_pb2.Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        ignore_eos=options.ignore_eos,
    )


def _token_ids(name: str) -> inference_pb2.TokenPrompt:
    try:
        ids = json.loads(_read(name))
    except json.JSONDecodeError as err:
        raise InvalidRequestError(f"{name}: not JSON: {err}") from err
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise InvalidRequestError(f"{name}: not a JSON list of whole numbers")
    try:
        return client.token_prompt(ids)
    except struct.error as err:
        wrong = next(one for one in ids if not 0 <= one < 2**32)
        raise InvalidRequestError(f"{name}: token id {wrong} is not in [0, 2**32)") from err


def _read(name: str) -> str:
    if name != "-":
        return read_text(name, InvalidRequestError)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as err:
        raise InvalidRequestError(f"standard input: {err}") from err


def _print_json(call: Iterable[inference_pb2.GenerateEvent]) -> bool:
    kind = None
    for event in call:
        found = client.as_dict(event)
        kind = found["event"]
        print(json.dumps(found, ensure_ascii=False), flush=True)
    return kind == "finished"


def _print_text(call: Iterable[inference_pb2.GenerateEvent]) -> bool:
    kind = None
    with PrefillLine() as line:
        for event in call:
            kind = event.WhichOneof("event")
            if kind == "accepted":
                line.update(0, event.accepted.prompt_tokens)
            elif kind == "progress":
                line.update(event.progress.prefilled_tokens, event.progress.prompt_tokens)
            elif kind != "prompt_logprobs":  # those come while the prompt is still prefilled
                line.stop()
            if kind == "tokens":
                print(event.tokens.text, end="", flush=True)
    if kind == "finished":
        print()
    return kind == "finished"
