#!/usr/bin/env bash
# Installs the Debian packages named in the given lists (default: packages.txt
# beside this file) that are missing. Does nothing, quickly, when all are there.
#
# usage: scripts/setup.sh [LIST...]
# exit:  0 everything is there now, 1 something could not be installed
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] || set -- "$here/packages.txt"
PATH=$PATH:/usr/sbin:/sbin

missing=()
for list in "$@"; do
	while read -r package command _; do
		case $package in '' | '#'*) continue ;; esac
		if [ -n "${command:-}" ]; then
			command -v "$command" >/dev/null || missing+=("$package")
		else
			dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
		fi
	done <"$list"
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ]; then
	echo "setup: missing packages: ${missing[*]}" >&2
	echo "setup: run as root, or: sudo apt-get install ${missing[*]}" >&2
	exit 1
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
