#!/bin/bash
# One generator for each label: independent workers that take labels from a queue in the run folder.
#
#   sbatch examples/slurm/per_label.sh folder --data /shared/photos --run-dir /shared/run
#
# Each task of the array is a worker; as many as there are free nodes run at once, and each can be lost. The run folder
# has to be on storage that all nodes share.
#SBATCH --job-name=paragan-labels
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120     # to the worker: it writes a checkpoint, returns its label, and ends with status 3
#SBATCH --requeue
#SBATCH --open-mode=append
# with GPUs: #SBATCH --gpus-per-task=1

srun paragan train "$@" --strategy per-label
status=$?
if [ $status -eq 3 ]; then
    scontrol requeue "$SLURM_JOB_ID" # ends this script; the next start goes on
fi
exit $status
