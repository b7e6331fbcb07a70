"""Endpoint picker for gateways: Envoy asks over external processing which engine serves a request, and sends it there.

Envoy carries the bytes. The picker reads the body, chooses and books a rank, names its engine's OpenAI address, and
follows the response to mark the prefill complete and to free the booking. It implements the endpoint picker protocol
1.0 of the Gateway API Inference Extension.
"""
