#!/bin/bash
# Train on all GPUs of several nodes; start again, and go on, whenever the time is over or the job is preempted.
#
#   sbatch examples/slurm/sync.sh folder --data /shared/photos --run-dir /shared/run
#
# The run folder has to be on storage that all nodes share.
#SBATCH --job-name=paragan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120     # to the ranks: they write a checkpoint, and end with status 3
#SBATCH --requeue
#SBATCH --open-mode=append
# with GPUs: #SBATCH --gpus-per-task=1

srun --kill-on-bad-exit=1 paragan train "$@"
status=$?
if [ $status -eq 3 ]; then
    scontrol requeue "$SLURM_JOB_ID" # ends this script; the next start resumes
fi
exit $status
