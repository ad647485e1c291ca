#!/usr/bin/env bash
# Prints docker/constraints.txt with other versions in place of some of its lines.
#
#   pins.sh [--in-place] [--cuda torch|tensorflow] [NAME==VERSION ...]
#
#   --cuda FRAMEWORK  take the lines `#cuda-FRAMEWORK NAME==VERSION` as well
#   --in-place        write constraints.txt itself (for the copy inside an image)

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
file=$here/constraints.txt

in_place=no
changes=()
while (($#)); do
    case $1 in
        --in-place) in_place=yes ;;
        --cuda)
            [[ ${2:-} =~ ^(torch|tensorflow)$ ]] || { echo "pins: --cuda takes torch or tensorflow, not '${2:-}'" >&2; exit 2; }
            mapfile -t -O ${#changes[@]} changes < <(sed -n "s/^#cuda-$2 //p" "$file")
            shift
            ;;
        *==*) changes+=("$1") ;;
        *) echo "pins: '$1' is not NAME==VERSION" >&2; exit 2 ;;
    esac
    shift
done

text=$(<"$file")
for change in "${changes[@]}"; do
    text=$(awk -v change="$change" '
        BEGIN { split(change, part, "=="); name = tolower(part[1]) "==" }
        tolower(substr($0, 1, length(name))) == name { next }
        { print }
        END { print change }' <<<"$text")
done
if [[ $in_place == yes ]]; then printf '%s\n' "$text" >"$file"; else printf '%s\n' "$text"; fi
