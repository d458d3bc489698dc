"""Channels outlive their node's record for as long as a request may be on them, and no longer."""

from __future__ import annotations

from grpc import ChannelConnectivity, aio

from kvrelay.router.lines import Lines


class _Channels:
    def __init__(self) -> None:
        self.opened: list[aio.Channel] = []

    def connect(self, endpoint: str) -> aio.Channel:
        self.opened.append(aio.insecure_channel(endpoint))
        return self.opened[-1]


def _is_closed(channel: aio.Channel) -> bool:
    return channel.get_state() is ChannelConnectivity.SHUTDOWN


async def test_a_line_is_closed_when_no_request_can_be_on_it_any_more() -> None:
    now_s, channels = 0.0, _Channels()
    lines = Lines(channels.connect, max_request_s=10.0, clock=lambda: now_s)
    assert lines.to("127.0.0.1:1") is lines.to("127.0.0.1:1")
    lines.to("127.0.0.1:2")

    lines.keep({"127.0.0.1:2"})
    now_s = 9.9
    await lines.close_retired()
    states = [lines.to("127.0.0.1:2").channel is channels.opened[1], _is_closed(channels.opened[0])]
    now_s = 10.0
    await lines.close_retired()

    assert states == [True, False]
    assert [_is_closed(channel) for channel in channels.opened] == [True, False]
    await lines.close()
    assert _is_closed(channels.opened[1])
