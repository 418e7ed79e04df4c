"""Older SDKs' forms of requests and answers, converted to today's. No other code depends on an SDK's version.

before 0.6    an image chunk has its size, and its token count is named `tokens` fields.image_fields
up to 0.16    chunks come without `type`                                         fields.chunk_type
before 0.20   results of forward_backward are JSON, of samples before 0.18       results
before 0.25   forward_backward is JSON, and /forward is a route of its own       forward.ForwardRequest
before 0.28   a list with a checkpoint of type `external` is refused by the SDK  versions.visible_kinds
before 0.36   weights are downloaded in one archive                              the route .../archive
before 0.40   links of an upload are texts, without headers                      versions.takes_upload_headers
all           nulls stand for defaults                                           base.Request
"""
