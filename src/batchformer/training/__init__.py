"""Code shared by all tasks: the `Task` base class, optimizers, schedules, weight averaging, the captured step."""
