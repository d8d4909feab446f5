"""``flashrecovery.init()``: where a training script comes in."""

from __future__ import annotations

import json
import os
from typing import Any

from flashrecovery.config import CONFIG_ENV, Settings, overlaid, validate
from flashrecovery.runtime.channel import CHANNEL_ENV
from flashrecovery.terminal import say
from flashrecovery.worker.recovery import Recovery

_instance: Recovery | None = None


def init(**overrides: Any) -> Recovery:
    """The recovery object of this process (always the same one). Before or after ``init_process_group``.

    Args:
        overrides: settings that a framework's own configuration has; they take precedence over the launcher's.

    Raises:
        ConfigError: a setting is wrong, or another one than the object was made with.
    """
    global _instance
    if _instance is None:
        session = None
        if CHANNEL_ENV in os.environ:
            from flashrecovery.torch_native import ModuleAdapter, adapter_for
            from flashrecovery.worker.session import Session
            from flashrecovery.worker.startup.bootstrap import connection

            values = overlaid(json.loads(os.environ[CONFIG_ENV]), overrides)
            settings = validate(Settings, values, "settings")
            session = Session(connection(), settings, adapter_for, ModuleAdapter)
        elif os.environ.get("RANK", "0") == "0":
            say("recovery is off (not started by `flashrecovery run`)")
        _instance = Recovery(session)
    else:
        _instance.check_settings(overrides)
    return _instance
