#!/bin/sh
# The server by hand. usage: curl.sh [http://127.0.0.1:8000]
set -eu
url=${1:-http://127.0.0.1:8000}

post() {
    curl -sS --fail-with-body "$url$1" -H 'Content-Type: application/json' -d "$2"
    echo
}

echo "-- is it ready? which models?"
curl -sS --fail "$url/health"
curl -sS --fail "$url/v1/models"
echo

echo "-- a question"
post /v1/chat/completions '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'

echo "-- a text to go on with, as a stream"
post /v1/completions '{"prompt": "Once upon a time", "max_tokens": 8, "stream": true}'

echo "-- its tokens"
post /tokenize '{"prompt": "Once upon a time", "return_token_strs": true}'
