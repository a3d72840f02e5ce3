#!/bin/sh
# Two hundred paid orders, new ones each time: `events` for `pipeline publish --file -`, `entries` for `redis-cli`.
set -eu

what=${1:?events or entries}
count=${2:-200}
batch=$(date +%s)
number=1
while [ "$number" -le "$count" ]; do
    order="$batch-$number"
    payload="{\"order\": \"$order\", \"email\": \"customer$number@example.org\"}"
    case $what in
    events) printf '{"message_id": "order:%s", "payload": %s}\n' "$order" "$payload" ;;
    entries) printf "XADD orders '*' data '%s'\n" "$payload" ;;
    *)
        echo "orders.sh: expected events or entries, got $what" >&2
        exit 2
        ;;
    esac
    number=$((number + 1))
done
