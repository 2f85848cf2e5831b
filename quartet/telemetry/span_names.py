"""Names of attributes of spans.

Those of generative AI are OpenTelemetry's semantic conventions, written out: the package with their constants has
moved, and they are not stable yet. Each of ours has its twin in a log line or in a message of the same name.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
NUM_CHOICES = "gen_ai.request.choice.count"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"

ERROR_TYPE = "error.type"

REQUEST_ID = "quartet.request_id"
CLIENT_REQUEST_ID = "quartet.client_request_id"
TENANT = "quartet.tenant"
PATH = "quartet.path"
OUTCOME = "quartet.outcome"
CHOICE = "quartet.choice"
ATTEMPT = "quartet.attempt"
NUM_ATTEMPTS = "quartet.num_attempts"
NAMESPACE = "quartet.namespace"
WORKER = "quartet.worker_id"
PREFILL_WORKER = "quartet.prefill_worker"
DECODE_WORKER = "quartet.decode_worker"
COST = "quartet.cost"
NUM_TOKENS = "quartet.num_tokens"
NUM_CACHED_TOKENS = "quartet.num_cached_tokens"
NUM_MATCHED_TOKENS = "quartet.num_matched_tokens"
NUM_ITEMS = "quartet.num_items"
NUM_ENCODED_ITEMS = "quartet.num_encoded_items"
SOURCE_WORKER = "quartet.source_worker"
TRANSFER_BYTES = "quartet.transfer_bytes"
TRANSFER_WAY = "quartet.transfer_way"

#: Events of spans.
FIRST_TOKEN, END = "first token", "end"
