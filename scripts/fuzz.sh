#!/usr/bin/env bash
# Runs every fuzz target of the module for the given time each, one after the other.
#
# usage: scripts/fuzz.sh [TIME]     TIME as go test -fuzztime takes it, default 30s
# exit:  0 nothing found, 1 a target found something (its input is under testdata/fuzz)
set -euo pipefail
time=${1:-30s}
passed=0 failed=0
while IFS=: read -r file name; do
	dir=$(dirname "$file")
	echo "fuzz ./$dir $name ($time)"
	if go test "./$dir" -run '^$' -fuzz "^$name\$" -fuzztime "$time" -fuzzminimizetime 1s -timeout 0; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
	fi
done < <(
	grep -rHoE --include='*_test.go' '^func (Fuzz[A-Za-z0-9_]+)' . | sed -E 's#^\./##; s/:func /:/' | sort)
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
