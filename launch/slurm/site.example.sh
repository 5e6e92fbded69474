# What a cluster needs before and around `bigsgan`: copy this to site.sh beside it, or anywhere and set BIGSGAN_SITE to
# its path, and uncomment what applies. The jobs of train.sbatch and evaluate.sbatch source it on their first node; what
# it exports reaches all ranks. Its last command has to succeed.

# The environment: modules, then a virtual environment or conda.
# module load cuda/12.4
# . /shared/venvs/bigsgan/bin/activate
# eval "$(conda shell.bash hook)" && conda activate bigsgan

# A container. Apptainer stands before the command; pyxis is an option of srun.
# command=(apptainer exec --nv --bind /shared /shared/images/bigsgan.sif)
# srun_options+=(--container-image=/shared/images/bigsgan.sqsh --container-mounts=/shared:/shared)

# The network. NCCL finds InfiniBand by itself; where it chooses the wrong one, name the right one.
# export NCCL_SOCKET_IFNAME=ib0 # interface for the rendezvous and for Ethernet traffic
# export NCCL_IB_HCA=mlx5       # adapters for the data
# export NCCL_DEBUG=INFO        # says in the logs what was chosen

# Where ranks run: on the cores next to their GPU.
# srun_options+=(--cpu-bind=cores --gpu-bind=single:1)

# Limits: locked memory for InfiniBand, open files for many loading processes. srun passes them on.
# ulimit -l unlimited
# ulimit -n 65536

# Copy data.root, packed data of a few files (`bigsgan data prepare`), to each node's own disk before training. A copy
# that an earlier job made of it is used, unless data.root has another size or time since. Sites remove such directories.
# stage_to=/local/$USER/$SLURM_JOB_ID

# How often a job that fails, or is stopped, goes back into the queue without a new checkpoint in between.
# BIGSGAN_RESTARTS=${BIGSGAN_RESTARTS:-5} # 3, where neither this nor `bigsgan submit --restarts` says more
