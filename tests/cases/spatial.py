"""Resizing, reading at positions, rearranging, Fourier transforms."""

from __future__ import annotations

import numpy as np

from cases.framework import Given, case, certain, const, ints, singles

# ------------------------------------------------------------------------- Resize

IMAGE, ROW = (1, 2, 3, 4), (2, 3)

case("Upsample", "y = Upsample<scales=[1.0, 1.0, 2.0, 3.0]>(x)", 7, x=IMAGE)
case("Upsample", "y = Upsample(x, s)", 9, x=IMAGE, s=singles(1, 1, 2, 3))
case("Upsample", 'y = Upsample<mode="linear">(x, s)', 9, x=IMAGE, s=singles(1, 1, 2, 3))

case("Resize", "y = Resize(x, s)", 10, x=IMAGE, s=singles(1, 1, 2, 1.5))
case("Resize", 'y = Resize<mode="linear">(x, s)', 10, x=IMAGE, s=singles(1, 1, 2, 0.5))
case("Resize", "y = Resize(x, r, s)", 11, x=IMAGE, r=singles(), s=singles(1, 1, 2, 1.5))
case("Resize", 'y = Resize<mode="linear">(x, r, s, n)', 11,
     x=IMAGE, r=singles(), s=singles(), n=ints(1, 2, 5, 7))  # fmt: skip
case("Resize", 'y = Resize<mode="cubic", coordinate_transformation_mode="tf_half_pixel_for_nn">(x, r, s)', 11,
     x=IMAGE, r=singles(), s=singles(1, 1, 2, 1.5))  # fmt: skip

MODES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
for kind in ("nearest", "linear", "cubic"):
    for transform in MODES:
        text = f'y = Resize<mode="{kind}", coordinate_transformation_mode="{transform}">(x, , s)'
        case("Resize", text, 13, x=IMAGE, s=singles(1, 1, 2.5, 0.7))
for mode in ("round_prefer_ceil", "floor", "ceil"):
    case("Resize", f'y = Resize<mode="nearest", nearest_mode="{mode}">(x, , s)', 13,
         x=IMAGE, s=singles(1, 1, 2.5, 0.7))  # fmt: skip
for kind in ("nearest", "linear"):
    text = f'y = Resize<mode="{kind}", coordinate_transformation_mode="half_pixel_symmetric">(x, , s)'
    case("Resize", text, 19, x=IMAGE, s=singles(1, 1, 2.3, 0.7))
    crop = 'coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=7.0'
    case("Resize", f'y = Resize<mode="{kind}", {crop}>(x, r, , n)', 13,
         x=IMAGE, r=singles(0, 0, 0.1, -0.3, 1, 1, 0.8, 1.2), n=ints(1, 2, 4, 5))  # fmt: skip
    case("Resize", f'y = Resize<mode="{kind}", {crop}, axes=[2, 3]>(x, r, , n)', 18,
         x=IMAGE, r=singles(0.1, -0.3, 0.8, 1.2), n=ints(4, 5))  # fmt: skip
case("Resize", 'y = Resize<mode="linear">(x, , , n)', 13, x=IMAGE, n=ints(1, 2, 5, 2))
case("Resize", 'y = Resize<mode="cubic">(x, , , n)', 13, x=IMAGE, n=ints(1, 2, 5, 2))
case("Resize", 'y = Resize<mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1>(x, , , n)', 13,
     x=IMAGE, n=ints(1, 2, 5, 2))  # fmt: skip
case("Resize", 'y = Resize<mode="linear">(x, , s)', 13, x=ROW, s=singles(2, 1.5))
case("Resize", 'y = Resize<mode="linear">(x, , s)', 13, x=(1, 2, 2, 3, 2), s=singles(1, 1, 2, 1.5, 2))
case("Resize", 'y = Resize<mode="linear">(x, , s)', 13, x=(1, 3, 4, 2), s=singles(1, 2, 1.5, 1))
case("Resize", 'y = Resize<mode="linear", axes=[3, -2]>(x, , n)', 18, x=IMAGE, n=singles(1.5, 2))
case("Resize", 'y = Resize<mode="linear", antialias=1>(x, , s)', 18,
     x=(1, 1, 6, 5), s=singles(1, 1, 0.4, 0.6))  # fmt: skip
case("Resize", 'y = Resize<mode="cubic", antialias=1>(x, , s)', 19, x=(1, 1, 6, 5), s=singles(1, 1, 0.4, 0.6))
case("Resize", 'y = Resize<mode="nearest", keep_aspect_ratio_policy="not_larger", axes=[2, 3]>(x, , , n)', 18,
     x=IMAGE, n=ints(5, 7))  # fmt: skip
case("Resize", 'n = Cast<to=7>(f); y = Resize<mode="linear">(x, , , n)', 13,
     x=IMAGE, f=singles(1, 2, 5, 7))  # fmt: skip

case("Resize", 'n = Shape(p); y = Resize<mode="linear">(x, , , n)', 13, x=IMAGE, p=certain(1, 2, 5, 7))
case("Resize", 'n = Shape(p); y = Resize<mode="linear">(x, , , n)', 13, x=(1, 3, 4, 2), p=certain(1, 5, 7, 2))

# -------------------------------------------------------------- rearranging, linear

case("Col2Im", "y = Col2Im(x, i, b)", 18, x=(1, 4, 4), i=ints(3, 3), b=ints(2, 2))
case("Col2Im", "y = Col2Im<dilations=[1,2], pads=[0,1,1,0], strides=[2,1]>(x, i, b)", 18,
     x=(2, 8, 6), i=ints(4, 4), b=ints(2, 2))  # fmt: skip
case("MaxUnpool", "y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(x, i)", 11,
     x=(1, 1, 2, 2), i=ints(5, 2, 8, 15, shape=(1, 1, 2, 2)))  # fmt: skip
case("MaxUnpool", "u = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(x, i, s); y = Reshape(u, s)", 9,
     x=(1, 1, 2, 2), i=ints(5, 2, 8, 15, shape=(1, 1, 2, 2)), s=ints(1, 1, 5, 4))  # fmt: skip
case("CenterCropPad", "y = CenterCropPad(x, s)", 18, x=(4, 3), s=ints(3, 6))
case("CenterCropPad", "y = CenterCropPad<axes=[1]>(x, s)", 18, x=(2, 5), s=ints(2))
case("AffineGrid", "y = AffineGrid(t, s)", 20, t=(2, 2, 3), s=ints(2, 1, 3, 4))
case("AffineGrid", "y = AffineGrid<align_corners=1>(t, s)", 20, t=(2, 2, 3), s=ints(2, 1, 3, 4))
case("AffineGrid", "y = AffineGrid(t, s)", 20, t=(1, 3, 4), s=ints(1, 1, 2, 3, 4))
# Whole offsets that move a kernel as one, or a kernel of one element: no two of its elements read the same
# pixel, and the rule is exact.
SHIFTS = Given(np.tile(np.resize([0.0, 1, -1, 0, 0], (1, 2, 3, 3)), (1, 4, 1, 1)))
case("DeformConv", "y = DeformConv(x, w, o)", 19, exact=True,
     x=(1, 2, 4, 4), w=const(2, 2, 2, 2), o=SHIFTS)  # fmt: skip
case("DeformConv", "y = DeformConv<pads=[1,1,0,0], offset_group=2, group=2>(x, w, o, b, m)", 19, exact=True,
     x=(2, 4, 3, 4), w=const(2, 2, 1, 1), o=const(2, 4, 4, 5), b=const(2), m=const(2, 2, 4, 5))  # fmt: skip
case("DeformConv", "y = DeformConv<strides=[2,2], dilations=[1,2]>(x, w, o, b)", 22, exact=True,
     x=(1, 2, 4, 4), w=const(2, 2, 1, 1), o=const(1, 2, 2, 2), b=(2,))  # fmt: skip
case("DeformConv", "y = DeformConv(x, w, o, b)", 19, exact=True,
     x=const(1, 2, 4, 4), w=const(2, 2, 1, 1), o=const(1, 2, 4, 4), b=(2,))  # fmt: skip

# --------------------------------------------------------------- reading at positions


def grid(shape: tuple[int, ...], lengths: tuple[int, ...], most: float) -> Given:
    """Positions within ±most for an image of these lengths, at fractions of 0.1 … 0.9 between pixels.

    A float32 grid holds a fraction to 1e-7; the square of a smaller one would not be right to 4e-5.
    """
    rng = np.random.default_rng(0)

    def draw(length: int) -> float:
        while True:
            place = rng.uniform(-most, most)
            fractions = np.array([(place + 1) / 2 * (length - 1), ((place + 1) * length - 1) / 2]) % 1
            if np.all((fractions > 0.1) & (fractions < 0.9)):
                return place

    innermost_first = lengths[::-1]
    return Given(np.array([draw(innermost_first[i[-1]]) for i in np.ndindex(shape)]).reshape(shape))


GRID, WIDE = grid((2, 3, 2, 2), (3, 4), 0.9), grid((2, 4, 5, 2), (3, 4), 2.5)
for padding in ("zeros", "border", "reflection"):
    for corners in (0, 1):
        for kind in ("nearest", "bilinear", "bicubic"):
            text = f'y = GridSample<mode="{kind}", padding_mode="{padding}", align_corners={corners}>(x, g)'
            case("GridSample", text, 16, x=(2, 2, 3, 4), g=WIDE)
case("GridSample", "y = GridSample(x, g)", 16, x=(2, 2, 3, 4), g=GRID)
case("GridSample", 'y = GridSample<mode="linear">(x, g)', 20, x=(2, 2, 3, 4), g=WIDE)
case("GridSample", 'y = GridSample<mode="cubic", padding_mode="border">(x, g)', 22, x=(2, 1, 3, 4), g=WIDE)
case("GridSample", 'y = GridSample<mode="linear", padding_mode="reflection">(x, g)', 20,
     x=(1, 2, 2, 3, 2), g=grid((1, 2, 2, 3, 3), (2, 3, 2), 1.8))  # fmt: skip

REGIONS = [[0.3, 0.6, 3.1, 4.2], [-1.2, 0.0, 2.0, 2.5], [2.0, 2.0, 2.2, 2.1], [1.0, 1.5, 9.0, 8.0]]
ROIS = Given(np.array(REGIONS))
BATCH = ints(0, 1, 1, 0)
for samples in (1, 2, 3):
    for version in (10, 16):
        text = f"y = RoiAlign<output_height=2, output_width=3, sampling_ratio={samples}>(x, r, b)"
        case("RoiAlign", text, version, exact=True, x=(2, 2, 5, 4), r=ROIS, b=BATCH)
case("RoiAlign", 'y = RoiAlign<coordinate_transformation_mode="output_half_pixel", output_height=2,'
     "output_width=2, sampling_ratio=2, spatial_scale=0.5>(x, r, b)", 16, exact=True,
     x=(2, 1, 4, 3), r=ROIS, b=BATCH)  # fmt: skip

# ------------------------------------------------------------------------- Fourier

case("DFT", "y = DFT(x)", 17, x=(2, 5, 1))
case("DFT", "y = DFT<axis=2, onesided=1>(x, n)", 17, x=(2, 2, 6, 1), n=Given(np.int64(4)))
case("DFT", "y = DFT<axis=1, inverse=1>(x)", 17, x=(2, 4, 3, 2))
case("DFT", "y = DFT(x, n)", 20, x=(2, 3, 2), n=Given(np.int64(6)))
case("DFT", "y = DFT(x, , a)", 20, x=(4, 3, 1), a=Given(np.int64(0)))
case("DFT", "y = DFT<onesided=1>(x, , a)", 20, x=(2, 6, 1), a=Given(np.int64(-2)))
case("STFT", "y = STFT(x, s, w)", 17, x=(2, 9, 1), s=Given(np.int64(2)), w=const(4))
case("STFT", "y = STFT<onesided=0>(x, s, w, n)", 17,
     x=(1, 8, 2), s=Given(np.int64(3)), w=const(4), n=Given(np.int64(4)))  # fmt: skip
case("STFT", "y = STFT(x, s, , n)", 17, x=(1, 8, 1), s=Given(np.int64(3)), n=Given(np.int64(5)))
