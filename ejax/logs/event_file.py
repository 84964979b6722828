"""TensorBoard's event file: TFRecords of ``Event`` messages, in protobuf's wire format.

tensorboardX has both, but its import is one of torch too where that is installed, 0.7 s of CPU of every start; and its
own writer would lose its queue, and wait for ever once its disk is full.
Source: event.proto, summary.proto and record_writer.h of TensorFlow.
"""

import functools
import math
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from ejax.schema.values import FLOAT32_MAX


def open_event_file(
    folder: Path, resume_step: int | None, stack: ExitStack
) -> Callable[[int, Mapping[str, float]], None]:
    """Begin an event file, closed by ``stack``. Returns its writer: all tags of one step are in one event."""
    folder.mkdir(parents=True, exist_ok=True)
    # Nanoseconds at the end: a resume in the same second gets its own file, and sorts after the earlier one.
    now = time.time_ns()
    name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
    file = stack.enter_context((folder / name).open("xb"))

    def append(*fields: bytes) -> None:
        """Append one TFRecord: u64 length, its CRC, the message, its CRC."""
        event = b"\x09" + struct.pack("<d", time.time()) + b"".join(fields)  # 1: wall_time
        length = struct.pack("<Q", len(event))
        file.write(length + _masked_crc(length) + event + _masked_crc(event))
        file.flush()

    def write(step: int, metrics: Mapping[str, float]) -> None:
        if values := [_value(tag, x) for tag, x in metrics.items() if not math.isnan(x)]:
            append(_step(step), _field(5, b"".join(values)))  # 5: summary

    append(_field(3, b"brain.Event:2"))  # 3: file_version
    if resume_step is not None:  # TensorBoard hides what earlier files hold from this step on
        append(_step(resume_step + 1), _field(7, b"\x08\x01"))  # 7: session_log, START
    return write


def _value(tag: str, x: float) -> bytes:
    x = x if abs(x) <= FLOAT32_MAX else math.copysign(math.inf, x)
    return _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", x))  # 2: simple_value


def _step(step: int) -> bytes:
    return b"\x10" + _varint(step)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Write 7 bits a byte, the lowest first; the eighth is set in all but the last."""
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


def _masked_crc(data: bytes) -> bytes:
    """Compute CRC-32C, rotated by 15 bits and shifted, so that a CRC of data with CRCs inside is none of zeros."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _crc_table()[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)  # Castagnoli's polynomial, its bits reversed
        table.append(crc)
    return table
