"""What is understood of the wire: one module for each protocol that inference servers speak."""

from collections.abc import Mapping

from quantdrift.core.records import Protocol
from sidecar.protocols.decoder import Decoder
from sidecar.protocols.oip import OipRest

DECODERS: Mapping[Protocol, Decoder] = {
    Protocol.OIP_REST: OipRest(),
}
