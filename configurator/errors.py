"""Errors the user can fix, and the one way scripts report them."""

import os
import sys
from collections.abc import Callable


class ConfigError(Exception):
    """A problem the user can fix: `.problems` holds one clear line per problem; str() joins them with newlines."""

    def __init__(self, problems: str | list[str]):
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self):
        return type(self), (self.problems,)  # the default would rebuild it from the joined text: one problem


def run(main: Callable[[list[str]], object]) -> None:
    """Call main(sys.argv[1:]) as a script: a ConfigError becomes `error: ...` lines on stderr and exit status 2.

    Ctrl-C exits with 130, a reader that went away (`| head`) ends the script quietly with 1.
    """
    try:
        try:
            main(sys.argv[1:])
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is noticed inside this try and not at interpreter exit
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        sys.exit(1)
