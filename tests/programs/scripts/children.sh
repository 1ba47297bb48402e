# bash: variables, functions, a trap, a job in the background and a pipeline between children.
folder=$1
trap 'caught=yes' USR1
declare -A table=([one]=1 [two]=2)
( n=0; while :; do n=$((n + 1)); echo $n; sleep 0.02; done ) | while read -r line; do echo "$line" > "$folder/last"; done &
job=$!
number=0
while :; do
  while [ ! -e "$folder/ask-$number" ]; do sleep 0.02; done
  caught=no
  kill -USR1 $$
  last=$(cat "$folder/last")
  until [ "$(cat "$folder/last")" != "$last" ]; do sleep 0.02; done
  if [ $caught = yes ] && [ "${table[two]}" = 2 ] && kill -0 $job && [ "$(jobs -rp | wc -l)" = 1 ]; then
    said="as it was"
  else
    said="caught=$caught table=${table[*]} jobs=$(jobs)"
  fi
  echo -n "$said" > "$folder/draft" && mv "$folder/draft" "$folder/answer-$number"
  number=$((number + 1))
done
