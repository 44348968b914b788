"""What is on this machine?"""

from dovetail.machine.facts import CardFacts, MachineFacts
from dovetail.machine.gpus import GpuReader
from dovetail.machine.read import read_machine

__all__ = ["read_machine", "MachineFacts", "CardFacts", "GpuReader"]
