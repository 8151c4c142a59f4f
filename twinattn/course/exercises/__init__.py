"""Exercises: write the functions of a serving engine yourself, and see at once whether they are right.

    functions          the exercises, by subject: the reference of each, its trials and known mistakes
    exercise           what an exercise is, and what comes of running a user's function on it
    puzzles            bugs that servers had, to be found
    predict            what a user expects of a cell, compared with its output
    learner, report    the files that a user edits; what the terminal shows
    here, in_page      the check in a notebook; in a page of the site, over the lists of `lists`
    nanoserve, serve   a server in one file, made of the exercises; the user's own functions in it

`twinattn exercises` writes the files, checks them and says which one is next.
"""
