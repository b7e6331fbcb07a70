from collections.abc import Sequence

from kvrouter.core.interface import Scope, TokenBuffer

def local_hashes(
    token_ids: TokenBuffer, block_size: int, scope: Scope = ..., multimodal: Sequence[tuple[int, int]] = ()
) -> bytes: ...
def sequence_hashes(local: bytes) -> bytes: ...
