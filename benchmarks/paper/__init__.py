"""Small comparisons of MHLA with other kinds of attention: train and score every variant, and write the results page.

    lightning paper --jobs 2                 # everything that is missing, hours on two cores
    lightning paper --only mnist --seeds 0   # one study, one seed
    lightning paper --page                   # docs/results.md from the existing results

Each row is a run of lightning fit with a shipped configuration and options that the page names. A run that is stopped
resumes from its last checkpoint. A row in benchmarks/results/paper is not trained again.
"""
