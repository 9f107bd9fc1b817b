"""Counting launches in XLA's list of thunks."""

from jaxserve.runtime.thunks import Launch, Launches, count_launches, list_launches

# A layout XLA printed, shortened: a loop in a loop, a conditional, a sliced copy.
SEQUENCE = """\
001: kCopy         [source       | next=002 (1) ] kCopy
002: kCustomKernel [prev=001 (1) | next=013 (4) ] loop_fusion grid: [3, 1, 1] threads: [128, 1, 1]
013: kWhile        [prev=012 (1) | next=048 (1) ]
condition:
    014: kCustomKernel [source | sink] loop_compare_fusion_2 grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    015: kAsyncStart   [source       | next=027 (10)] stream=computation_stream[0], async_id=15
        017: kDynamicSliceFusion [source | sink] params=1, results=1
            016: kCopy [source | sink] kCopy
    026: kAsyncDone    [source       | sink         ] async_id=15
    033: kWhile         [prev=032 (1) | next=038 (1)]
condition:
        034: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        035: kCustomKernel [source       | next=037 (2)] fusion_1 grid: [4, 1, 1] threads: [128, 1]
    042: kCustomKernel [prev=041 (1) | sink        ] loop_add_fusion_6 grid: [1, 1, 1] threads: [1]
048: kCustomKernel [prev=013 (1) | next=049 (1) ] gemm_fusion_dot_18 grid: [6, 1, 1] threads: [64]
129: kConditional  [prev=098 (1) | next=130 (1) ]
  false_branch:
    099: kCustomKernel [source       | next=125 (5)] input_reduce_fusion_6 grid: [1, 1, 1]
    105: kWhile         [prev=104 (1) | sink        ]
condition:
        106: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  true_branch:
    128: kCopy [source | sink] kCopy
130: kGemm         [prev=129 (1) | sink         ] cublas
"""


def test_launches_are_told_apart_by_how_often_they_happen():
    assert count_launches(SEQUENCE) == Launches(once=4, in_loops=5, in_branches=3)


def test_what_holds_other_thunks_launches_nothing_itself():
    nested = "001: kSequential []\n    002: kCommandBuffer []\n        003: kCustomKernel [] f\n"
    assert count_launches(nested) == Launches(once=1, in_loops=0, in_branches=0)


def test_a_step_after_a_loop_is_outside_it():
    assert count_launches("001: kWhile []\n002: kCopy []\n") == Launches(1, 0, 0)


def test_an_empty_list_launches_nothing():
    assert count_launches("") == Launches(0, 0, 0)


def test_each_launch_is_listed_with_its_place_and_a_kernels_shape():
    sequence = (
        "001: kCopy [source | next=002 (1) ] kCopy\n"
        "002: kCustomKernel [prev=001 (1) | sink] walk grid: [8, 2, 1] threads: [128, 2, 1]"
        "  shared_memory: 21504 bytes\n"
        "013: kWhile [prev=012 (1) | next=048 (1)]   \n"
        "  body:\n"
        "    003: kCustomKernel [source | sink] add grid: [3, 1, 1] threads: [64, 1, 1]\n"
    )
    assert list(list_launches(sequence)) == [
        Launch(1, "kCopy", "kCopy", "once"),
        Launch(2, "kCustomKernel", "walk", "once", (8, 2, 1), 256, 21504),
        Launch(3, "kCustomKernel", "add", "loop", (3, 1, 1), 64, 0),
    ]
