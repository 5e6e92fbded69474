# What train.sbatch and evaluate.sbatch share: the site's file, and one rank for each GPU. They source it.

# The last task of an array has the number of the whole array, as which Slurm would take it.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

# Say what is wrong in one line, and end the job with the status of bad input.
refuse() { echo "bigsgan: $*" >&2; exit 2; }

# sbatch's options as srun's: `layout` starts all $ranks ranks. What cannot be right is refused.
plan_ranks() {
    local gpus counts tasks nodes=$SLURM_JOB_NUM_NODES per_task=${SLURM_GPUS_PER_TASK:-${SLURM_NTASKS_PER_GPU:-}}
    local asked=${SLURM_NTASKS:-${SLURM_NTASKS_PER_NODE:+$((SLURM_NTASKS_PER_NODE * nodes))}}
    [ "${SLURM_HET_SIZE:-1}" -eq 1 ] || refuse "--het-group: ranks run on one component; submit without ':'"
    layout=(--kill-on-bad-exit=1)
    counts=$(gpus_on_nodes)
    gpus=${SLURM_GPUS_PER_NODE:-$counts}
    gpus=${gpus##*:} # behind their type, as in a100:4
    if [ -n "$per_task" ]; then
        [ "${per_task##*:}" = 1 ] || refuse "--gpus-per-task, --ntasks-per-gpu: $per_task is not one GPU a rank; give 1"
        ranks=${asked:-0}
        [ "$ranks" -gt 0 ] || refuse "--ntasks: must be given with --gpus-per-task; add --ntasks"
    elif [ "$gpus" != 0 ]; then
        [[ "$gpus" != *" "* ]] ||
            refuse "nodes: have ${counts// / and } GPUs; give --gpus-per-node, or --gpus-per-task 1 with --ntasks"
        ranks=$((gpus * nodes))
        [ "${asked:-$ranks}" -eq "$ranks" ] ||
            refuse "--ntasks: $asked is not one for each of $ranks GPUs; leave it out, or give --gpus-per-task 1"
        # srun gives a step what sbatch was asked for by name, which is none of a node's GPUs where it was taken whole.
        layout+=(--ntasks-per-node="$gpus" --gpus-per-node="${SLURM_GPUS_PER_NODE:-$gpus}")
    else
        ranks=${asked:-$nodes}
        [ -n "$asked" ] || layout+=(--ntasks-per-node=1)
    fi
    # On the node with the most ranks, and on the node with the fewest CPUs.
    tasks=$(((ranks + nodes - 1) / nodes))
    [ -z "$asked" ] || tasks=$(numbers "$SLURM_TASKS_PER_NODE" | tail -n 1)
    cpus=$(numbers "$SLURM_JOB_CPUS_PER_NODE" | head -n 1)
    cpus=${SLURM_CPUS_PER_TASK:-$((cpus > tasks ? cpus / tasks : 1))} # of a rank and its loading processes
    layout+=(--ntasks="$ranks" --cpus-per-task="$cpus")
}

# How many GPUs the nodes of this job have, each number once: of GRES=gpu:2(IDX:0-1), or gpu:a100:2(...), or none.
gpus_on_nodes() {
    local found
    found=$(scontrol show job -d "$job" | awk '/ Nodes=.* CPU_IDs=/ {
        for (n = 0; match($0, /[=,]gpu:[^(]*\(/); $0 = substr($0, RSTART + RLENGTH)) {
            count = substr($0, RSTART, RLENGTH - 1); sub(/.*:/, "", count); n += count }
        print n }' | sort -nru | xargs)
    [ "${found:-0}" != 0 ] || found=${SLURM_GPUS_ON_NODE:-0} # scontrol of another version
    echo "$found"
}

# The numbers in a list such as 8(x2),4, from the least.
numbers() { tr ',' '\n' <<<"$1" | sed 's/(.*//' | sort -n; }

# Copy data.root to every node's own disk, and tell the ranks: `staged` is the option. They compare their data sets.
stage() {
    local root copy mark
    staged=()
    [[ -n "$stage_to" && " $*" != *" --data-root"[=\ ]* ]] || return 0 # or the user names a copy
    root=$(on_one train "$@" --print data.root) || return
    [ -n "$root" ] || refuse "stage_to: this recipe has no data.root to copy; leave it empty in $site"
    root=$(realpath -e "$root") || refuse "data.root: '$root' cannot be read on $(hostname)"
    mark=$(stat -c '%n %s %Y' "$root" | cksum) # other data of the same name, or newer data, takes another place
    copy=$stage_to/${mark%% *}/${root##*/}
    echo "copying $root to $copy on $SLURM_JOB_NUM_NODES nodes"
    # Under another name until it is whole; what is there already, as of an earlier job, is taken as it is.
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
        part=$2.$SLURM_JOB_ID.$SLURM_NODEID
        [ -e "$2" ] && exit
        names=${1%/*}/classes.json # of the classes in a single shard
        mkdir -p "${2%/*}" && { [ -d "$1" ] || [ ! -e "$names" ] || cp "$names" "${2%/*}"; } &&
            cp -rL "$1" "$part" && mv -T "$part" "$2" && exit
        rm -rf "$part"; [ -e "$2" ]' stage "$root" "$copy" || return # of a node, as a full disk is, or of a signal
    staged=(--data-root "$copy")
}

# Run `bigsgan` on all ranks; or on this node as one of them, to ask it something.
on_all() { srun "${layout[@]}" ${srun_options[@]+"${srun_options[@]}"} ${command[@]+"${command[@]}"} bigsgan "$@"; }
on_one() {
    local step=()
    if in_container; then step=(srun --nodes=1 --ntasks=1 --ntasks-per-node=1 "${srun_options[@]}"); fi
    RANK=0 WORLD_SIZE=$ranks ${step[@]+"${step[@]}"} ${command[@]+"${command[@]}"} bigsgan "$@"
}
in_container() { [[ " ${srun_options[*]-}" == *" --container"* ]]; } # pyxis's, which srun alone starts

# A site's file may set these; see site.example.sh.
srun_options=() # of srun, such as --container-image
command=()      # before `bigsgan`, such as apptainer exec --nv image.sif
stage_to=       # directory on each node's own disk to copy data.root to before training

# The file itself knows nothing of `set -u`: conda's and the modules' scripts fail under it.
site=${BIGSGAN_SITE:-$BIGSGAN_SLURM/site.sh}
if [ -f "$site" ]; then
    set +u
    . "$site" || refuse "$site: ended with status $?; run it by itself: bash $site"
    set -u
elif [ -n "${BIGSGAN_SITE:-}" ]; then
    refuse "BIGSGAN_SITE: must be a file, got '$site'; give the path of a copy of launch/slurm/site.example.sh"
fi
[ ${#command[@]} -gt 0 ] || in_container || command -v bigsgan >/dev/null ||
    refuse "bigsgan: must be on the PATH of the job; activate its environment before sbatch, or in $site"
most_restarts=${BIGSGAN_RESTARTS:-3}
[[ "$most_restarts" =~ ^[0-9]+$ ]] || refuse "BIGSGAN_RESTARTS: must be a number, got '$most_restarts'; give one such as 3"
notice=${BIGSGAN_NOTICE:-180}
[[ "$notice" =~ ^[0-9]+$ ]] || refuse "BIGSGAN_NOTICE: must be a number of seconds, got '$notice'; give one such as 180"
notice=$((10#$notice)) # a leading 0 is no octal number
export SLURM_EXPORT_ENV=ALL # sbatch --export=NONE leaves NONE for srun: ranks need what was set up here
