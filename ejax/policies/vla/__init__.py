"""A vision-language-action policy: pictures, an instruction and joint angles in, a chunk of actions out."""
