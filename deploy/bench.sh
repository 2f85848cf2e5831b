#!/bin/sh
# Measures a deployment over a list of concurrencies, with the arguments of Dynamo's bench.sh in their order, by
# `quartet bench`; see docs/bench.md. The router comes from QUARTET_ROUTER or QUARTET_ETCD, as for other commands.
set -eu

usage() {
  cat >&2 <<END
bench.sh: $1

usage: bench.sh MODEL [MULTI_ROUND [NUM_GEN_SERVERS [CONCURRENCY_LIST [STREAMING [LOG_PATH [TOTAL_GPUS
                [MODEL_PATH [ISL [OSL [KIND]]]]]]]]]]

An empty argument takes its default.
  MODEL             name that requests ask for; empty: the only one there
  MULTI_ROUND       requests for each client (8)
  NUM_GEN_SERVERS   Decode workers: each concurrency is multiplied by it (1)
  CONCURRENCY_LIST  clients for each Decode worker, in order ("1 2 4 8")
  STREAMING         true, the only way: tokens are timed as they come (true)
  LOG_PATH          folder for results, and the --log-dir of \`quartet up\`, whose logs are cut by load (bench_logs)
  TOTAL_GPUS        GPUs of the deployment, for throughput a GPU; empty: not said
  MODEL_PATH        where the model's files are, for the record; empty: not said
  ISL, OSL          longest prompt and answer in tokens; lengths are drawn from 80 % of these up (1024, 128)
  KIND              what to call the deployment (disagg)
Environment: QUARTET_BENCH_WAIT_S: seconds to wait until the deployment is ready (300).
END
  exit 2
}

is_count() {
  case $1 in
    '' | 0* | *[!0-9]*) return 1 ;;
  esac
}

count() { # NAME VALUE
  is_count "$2" || usage "$1 must be a whole number from 1 on, not '$2'"
}

find_quartet() { # on the PATH, else in the checkout that this script is in
  command -v quartet && return
  own=$(dirname "$0")/../.venv/bin/quartet
  if [ ! -x "$own" ]; then
    echo "bench.sh: no quartet on the PATH, and no $own: activate the environment that has it, or run make setup" >&2
    exit 1
  fi
  echo "$own"
}

[ $# -ge 1 ] || usage "MODEL is missing"
[ $# -le 11 ] || usage "$# arguments, and there are 11: quote the list of concurrencies"

model=$1
multi_round=${2:-8}
num_gen_servers=${3:-1}
concurrency_list=${4:-1 2 4 8}
streaming=${5:-true}
log_path=${6:-bench_logs}
total_gpus=${7:-}
model_path=${8:-}
isl=${9:-1024}
osl=${10:-128}
kind=${11:-disagg}
wait_s=${QUARTET_BENCH_WAIT_S:-300}

count MULTI_ROUND "$multi_round"
count NUM_GEN_SERVERS "$num_gen_servers"
[ -z "$total_gpus" ] || count TOTAL_GPUS "$total_gpus"
count ISL "$isl"
count OSL "$osl"
[ "$streaming" = true ] || usage "STREAMING must be true, not '$streaming': every answer is a stream, and its tokens are timed"

# One client comes first: what a request takes on an idle deployment.
sweep=1
for concurrency in $(printf %s "$concurrency_list" | tr ',' ' '); do
  count CONCURRENCY_LIST "$concurrency"
  clients=$((concurrency * num_gen_servers))
  [ "$clients" -eq 1 ] || sweep=$sweep,$clients
done

shortest() { # 80 % of a length, and at least 1
  echo $((($1 * 8 + 9) / 10))
}

set -- --wait "$wait_s" --sweep "$sweep" --rounds "$multi_round" --out "$log_path" \
  --prompt-tokens "$(shortest "$isl")-$isl" --output-tokens "$(shortest "$osl")-$osl" --label "kind=$kind"
[ -z "$model" ] || set -- "$@" --model "$model"
[ -z "$total_gpus" ] || set -- "$@" --label "total_gpus=$total_gpus"
[ -z "$model_path" ] || set -- "$@" --label "model_path=$model_path"
if [ -n "$(find "$log_path" -maxdepth 1 -name '*.log' 2>/dev/null | head -n 1)" ]; then
  set -- "$@" --log-dir "$log_path"
else
  echo "bench.sh: no *.log in $log_path: workers' logs are not cut by load (quartet up --log-dir $log_path)" >&2
fi
quartet=$(find_quartet)
exec "$quartet" bench "$@"
