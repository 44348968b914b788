"""What must be written down of a controller, so that the same one can be made again and fed the same events?"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import Deliver, Hosted
from dovetail.control.wire import decode_command, encode_command
from dovetail.resources.seat import Seat
from dovetail.resources.shape import Shape
from dovetail.scheduling.plan import Plan
from dovetail.scheduling.rules import Rules
from dovetail.streaming.controller import Stream
from dovetail.streaming.options import Options
from dovetail.streaming.work import Work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.resources.seat import Seats


def header_of(
    works: Sequence[Work], plan: Plan, options: Options, resume: Sequence[Deliver] = (), reserved: Seats = ()
) -> dict[str, Any]:
    """Plain data, all of it."""
    return {
        "works": [_of_work(work) for work in works],
        "plan": plan.to_dict(),
        "options": asdict(options),
        "resume": [encode_command(deliver) for deliver in resume],
        "reserved": [seat.to_dict() for seat in reserved],
    }


def stream_of(header: Mapping[str, Any]) -> Stream:
    """A fresh controller, as it was at the beginning."""
    options = Options(**{**header["options"], "rules": Rules(**header["options"]["rules"])})
    resume = [command for command in map(decode_command, header["resume"]) if isinstance(command, Deliver)]
    works = [_work(data) for data in header["works"]]
    reserved = tuple(map(Seat.from_dict, header.get("reserved", ())))
    return Stream(works, Plan.from_dict(header["plan"]), options, resume, reserved)


def _of_work(work: Work) -> dict[str, Any]:
    plain = {item.name: getattr(work, item.name) for item in fields(work)}
    return plain | {
        "shape": work.shape.to_dict(),
        "hosted": [work.hosted.name, work.hosted.slots],
        "parents": list(work.parents),
        "stages": list(work.stages),
    }


def _work(data: Mapping[str, Any]) -> Work:
    name, slots = data["hosted"]
    shape, hosted = Shape.from_dict(data["shape"]), Hosted(name, slots=slots)
    names = {"parents": tuple(data["parents"]), "stages": tuple(data.get("stages", ()))}
    return Work(**{**data, "shape": shape, "hosted": hosted, **names})
