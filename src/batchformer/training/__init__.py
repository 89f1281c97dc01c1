"""Code that all tasks share: the `Task` base class, optimizers, schedules, weight averaging, the captured step."""
