"""The token of a device that was given no credentials: the one that the coordinator of the same user has written.

Called by ``hoop device`` before its server starts, so that no device listens without authentication by default.
"""

from __future__ import annotations

import asyncio
from typing import cast

import grpc

from hoop.errors import FailedPrecondition, Unauthenticated
from hoop.topology import Addresses
from hoop.wire.auth import Credentials
from hoop.wire.channels import Backoff, channel_options
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.local_token import find_token, runtime_folder
from hoop.wire.roles import Role
from hoop.wire.service import status_of, translate, unreachable
from hoop.wire.tokens import Token

CALL_S = 5.0


async def wait_for_token(coordinator: Addresses, timeout_s: float) -> Token:
    """The token that this user's coordinator at a loopback address has written; waits until it is up.

    Raises if the coordinator answers and there is none: it is another user's, has credentials, or is open to everybody.
    """
    backoff = Backoff("the coordinator", coordinator, timeout_s)
    if (token := find_token(coordinator)) is not None:
        return token
    async with Credentials(Role.DEVICE).aio_channel(coordinator, Role.COORDINATOR, channel_options()) as channel:
        stub = cast("pb_grpc.CoordinatorAsyncStub", pb_grpc.CoordinatorStub(channel))
        for delay in backoff.delays():
            try:
                await stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_S)
            except grpc.RpcError as error:
                if (token := find_token(coordinator)) is not None:  # written before the first call is answered
                    return token
                if not unreachable(error):
                    if isinstance(translate(error), Unauthenticated):
                        raise _no_token(coordinator) from None
                    raise translate(error, f"the coordinator at {coordinator}") from None
                backoff.record_failure(status_of(error))
                await asyncio.sleep(delay)
            else:
                raise FailedPrecondition(
                    f"the coordinator at {coordinator} accepts every caller (--insecure), and has no token for its "
                    "devices; start this device with --insecure too, or the coordinator without"
                )
    raise backoff.timeout_error()


def _no_token(coordinator: Addresses) -> Unauthenticated:
    return Unauthenticated(
        f"the coordinator at {coordinator} authenticates its callers, and {runtime_folder()} has no token for it: it "
        "has one from a file, or is another user's; give its token with --token-file FILE, or HOOP_TOKEN"
    )
