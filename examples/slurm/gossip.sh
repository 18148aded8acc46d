#!/bin/bash
# Gossip training that goes on without the ranks that it loses, and takes them back.
#
#   sbatch examples/slurm/gossip.sh folder --data /shared/photos --run-dir /shared/run
#   sbatch examples/slurm/gossip.sh folder ... --strategy sync --strategy.peer_timeout_s=10
#
# srun lets the other ranks run when one dies (--kill-on-bad-exit=0), or a node (--no-kill). A rank that died is started
# again, and joins the others. The run folder has to be on storage that all nodes share.
#SBATCH --job-name=paragan-gossip
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120     # to the ranks: they write a checkpoint, and end with status 3
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --no-kill
# with GPUs: #SBATCH --gpus-per-task=1

# A file of ranks that ended with status 3: srun ends with the highest status, which is that of a killed task.
export stopped=$PWD/paragan-$SLURM_JOB_ID.stopped
rm -f "$stopped"
rank() {
    trap '' USR1 # is for paragan
    for attempt in 1 2 3; do
        if [ -e "$stopped" ]; then return 3; fi # the others have ended
        paragan train --strategy gossip "$@"
        status=$?
        if [ $status -eq 3 ]; then touch "$stopped"; fi
        case $status in 0 | 2 | 3) return $status ;; esac # done, refused, stopped
        sleep 5
    done
    return $status
}
export -f rank
srun --kill-on-bad-exit=0 --no-kill bash -c 'rank "$@"' rank "$@"
status=$?
if [ $status -eq 3 ] || [ -e "$stopped" ]; then
    rm -f "$stopped"
    scontrol requeue "$SLURM_JOB_ID" # ends this script; the next start resumes
fi
exit $status
