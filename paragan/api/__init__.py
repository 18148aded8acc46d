"""The Python interface of the ParaGAN paper (Fig. 5), with the names of the figure.

    scale_mgr = pg.ScalingManager(config=cfg, bs=2048, num_workers=128)
    gan = pg.Estimator(Generator(), Discriminator())
    for step in cfg.max_steps:
        scale_mgr.train(gan)
    scale_mgr.eval(metric="fid")

Under torchrun, srun or mpirun every process runs the same script.
"""
