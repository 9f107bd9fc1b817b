"""Where state meets the math: steps, executables, the engine."""
