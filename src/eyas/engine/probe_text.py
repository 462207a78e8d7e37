"""The text of the acceptance probe: a question and an answer in the manner of an assistant, with
prose, a list, a sum and some code, so that a draft trained on chat meets what it knows."""

QUESTION = "What are lighthouses for, and how far away can their light be seen?"

ANSWER = '''\
A lighthouse is a tower with a bright light at the top, built to guide ships at sea. In the past, \
most lighthouses had a keeper who lived there with his family and lit the lamp every evening. \
Today, almost all of them are automatic. Here are three reasons why they were so important:

1. They showed sailors where the coast was, even at night or in bad weather.
2. They warned of rocks, sandbanks and other dangers near the shore.
3. Each one had its own pattern of flashes, so that a captain could tell which harbour was ahead.

To work out how far away the light can be seen, you need to know how high it stands. For example, \
if the lamp is 25 metres above the water, it can be seen from about 18 kilometres. Let's write a \
short function for that:

```python
import math

def distance_to_horizon(height):
    """Return the distance to the horizon in kilometres, for a height in metres."""
    if height < 0:
        raise ValueError("height must not be negative")
    return 3.57 * math.sqrt(height)

print(distance_to_horizon(25))
```

The answer is 17.85. Of course, this is only an estimate, because the air bends the light a little \
and the person who looks for it does not stand at the level of the sea. In conclusion, lighthouses \
are not only beautiful buildings. They are also a good example of how a simple idea can save many \
lives. Thank you for reading, and please let me know if you have any questions.
'''
