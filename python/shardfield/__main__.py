"""`python -m shardfield` is the `shardfield` command."""

import sys

from shardfield._command_line import main

sys.exit(main())
