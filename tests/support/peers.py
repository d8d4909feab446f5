"""What an agent does for others, with little or nothing behind it."""

from __future__ import annotations

from pathlib import Path

from flashrecovery.agent.controller_link.session import ControllerSession
from flashrecovery.agent.peers.client import Asking
from flashrecovery.agent.peers.election import Election
from flashrecovery.agent.peers.relay import Relay
from flashrecovery.agent.peers.service import PeerDuties, PeerService
from flashrecovery.agent.processes.setup_logs import SetupLogs
from flashrecovery.rpc.channel import Access


def peer_service(
    access: Access,
    session: ControllerSession | None = None,
    *,
    logs: SetupLogs | None = None,
    staging: Path | None = None,
) -> PeerService:
    """Of an agent with this session; None: of one that hears no controller. ``logs``: the set-up logs that it keeps."""

    async def no_vouch(asking: Asking, wait_s: float) -> bool:
        return False

    logs = logs or SetupLogs(access)
    duties = PeerDuties(
        election=Election("alone", str, float, 1.0, lambda: None) if session is None else session.election,
        relay=Relay("alone", access) if session is None else session.relay,
        vouch=no_vouch if session is None else session.vouch,
        generation=int,
        keep_log=logs.keep,
        log_of=logs.own,
        staging=staging,
    )
    return PeerService(access, duties)
