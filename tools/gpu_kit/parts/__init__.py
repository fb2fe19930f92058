"""The parts of the kit. Each is a program: `python -m tools.gpu_kit.parts.NAME RESULT.json DEVICE [WORDS ...]`."""
