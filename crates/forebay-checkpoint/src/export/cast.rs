//! Casts among F64, F32, F16 and BF16, with the bits that torch's `Tensor.to` gives.
//!
//! Rounding is to nearest, ties to even; what is too large becomes infinite, small numbers become subnormal, NaN
//! stays NaN with its sign. F64 goes to the two short types by way of F32, as in torch, so that a number extremely
//! near a tie is rounded twice.

use forebay_tensor::Dtype;

/// Whether tensors of a type are cast at all: all else keeps its type.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// Appends elements of another type. Both types are [floats](is_float), and the bytes whole elements.
pub(crate) fn cast(from: Dtype, to: Dtype, bytes: &[u8], out: &mut Vec<u8>) {
    match (from, to) {
        (Dtype::F32, Dtype::BF16) => {
            each(bytes, out, |bits| bf16(u32::from_le_bytes(bits)).to_le_bytes())
        }
        (Dtype::F32, Dtype::F16) => {
            each(bytes, out, |bits| f16(u32::from_le_bytes(bits)).to_le_bytes())
        }
        (Dtype::F32, Dtype::F64) => {
            each(bytes, out, |bits| f64::from(f32::from_le_bytes(bits)).to_le_bytes());
        }
        (Dtype::BF16, Dtype::F32) => each(bytes, out, |bits| of_bf16(bits).to_le_bytes()),
        (Dtype::BF16, Dtype::F16) => each(bytes, out, |bits| f16(of_bf16(bits)).to_le_bytes()),
        (Dtype::BF16, Dtype::F64) => {
            each(bytes, out, |bits| f64::from(f32::from_bits(of_bf16(bits))).to_le_bytes());
        }
        (Dtype::F16, Dtype::F32) => each(bytes, out, |bits| of_f16(bits).to_le_bytes()),
        (Dtype::F16, Dtype::BF16) => each(bytes, out, |bits| bf16(of_f16(bits)).to_le_bytes()),
        (Dtype::F16, Dtype::F64) => {
            each(bytes, out, |bits| f64::from(f32::from_bits(of_f16(bits))).to_le_bytes());
        }
        (Dtype::F64, Dtype::F32) => each(bytes, out, |bits| of_f64(bits).to_le_bytes()),
        (Dtype::F64, Dtype::F16) => each(bytes, out, |bits| f16(of_f64(bits)).to_le_bytes()),
        (Dtype::F64, Dtype::BF16) => each(bytes, out, |bits| bf16(of_f64(bits)).to_le_bytes()),
        _ => out.extend_from_slice(bytes),
    }
}

fn each<const FROM: usize, const TO: usize>(
    bytes: &[u8],
    out: &mut Vec<u8>,
    convert: impl Fn([u8; FROM]) -> [u8; TO],
) {
    let (elements, _) = bytes.as_chunks::<FROM>();
    let start = out.len();
    out.resize(start + elements.len() * TO, 0);
    let (into, _) = out.get_mut(start..).unwrap_or_default().as_chunks_mut::<TO>();
    // Side by side, so that the compiler can do many at once.
    for (element, into) in elements.iter().zip(into) {
        *into = convert(*element);
    }
}

/// A single, by its bits.
fn of_f64(bits: [u8; 8]) -> u32 {
    (f64::from_le_bytes(bits) as f32).to_bits()
}

fn of_bf16(bits: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(bits)) << 16
}

fn of_f16(bits: [u8; 2]) -> u32 {
    let bits = u32::from(u16::from_le_bytes(bits));
    let (sign, exponent, mantissa) = (bits >> 15 << 31, bits >> 10 & 0x1f, bits & 0x3ff);
    let magnitude = match exponent {
        // Subnormal: so many times 2^-24, exact in a single.
        0 => (mantissa as f32 * f32::from_bits(0x3380_0000)).to_bits(),
        // Infinite, or NaN, which is quiet from here on.
        0x1f if mantissa == 0 => 0x7f80_0000,
        0x1f => 0x7fc0_0000 | mantissa << 13,
        _ => ((exponent + (127 - 15)) << 23) | (mantissa << 13),
    };
    sign | magnitude
}

fn bf16(bits: u32) -> u16 {
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return (bits >> 16) as u16 | 0x40;
    }
    // Half of the last place, less one where that place is even: a tie carries into odd places alone. Finite numbers
    // that are too large carry into the infinite one.
    let half = 0x7fff + (bits >> 16 & 1);
    (bits.wrapping_add(half) >> 16) as u16
}

fn f16(bits: u32) -> u16 {
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    let rounded = match magnitude {
        0x7f80_0001.. => 0x7e00 | magnitude >> 13 & 0x3ff,
        // 65520 and more: nearer to 65536, which there is not.
        0x477f_f000.. => 0x7c00,
        // 2^-14 and more: normal. The exponents are 112 apart.
        0x3880_0000.. => {
            let half = 0xfff + (magnitude >> 13 & 1);
            (magnitude - (112 << 23) + half) >> 13
        }
        // So many times 2^-24: adding 0.5 makes the sum's last place that, and the addition rounds as wanted.
        _ => (f32::from_bits(magnitude) + 0.5).to_bits() - 0x3f00_0000,
    };
    sign | rounded as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(from: Dtype, to: Dtype, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        cast(from, to, bytes, &mut out);
        out
    }

    /// The value of a short float, worked out from the definition of its format.
    fn value(bits: u16, exponent_bits: u32) -> f64 {
        let mantissa_bits = 15 - exponent_bits;
        let bias = (1 << (exponent_bits - 1)) - 1;
        let exponent = i32::from(bits & 0x7fff) >> mantissa_bits;
        let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1));
        let scale = f64::from(1_u32 << mantissa_bits);
        let magnitude = match exponent {
            0 => mantissa / scale * 2_f64.powi(1 - bias),
            e if e == (1 << exponent_bits) - 1 => {
                if mantissa == 0.0 {
                    f64::INFINITY
                } else {
                    f64::NAN
                }
            }
            e => (1.0 + mantissa / scale) * 2_f64.powi(e - bias),
        };
        if bits >> 15 == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn short_floats_widen_exactly_and_come_back() {
        for (dtype, exponent_bits) in [(Dtype::F16, 5), (Dtype::BF16, 8)] {
            for bits in 0..=u16::MAX {
                let wide = of(dtype, Dtype::F32, &bits.to_le_bytes());
                let single = f32::from_le_bytes(wide.as_slice().try_into().unwrap());
                let wanted = value(bits, exponent_bits);
                assert_eq!(single.is_nan(), wanted.is_nan(), "{bits:04x}");
                let back = of(Dtype::F32, dtype, &wide);
                if wanted.is_nan() {
                    let back = u16::from_le_bytes([back[0], back[1]]);
                    assert!(value(back, exponent_bits).is_nan() && back >> 15 == bits >> 15);
                    continue;
                }
                assert_eq!(f64::from(single), wanted, "{bits:04x}");
                assert_eq!(back, bits.to_le_bytes(), "{bits:04x}");
                let double = of(dtype, Dtype::F64, &bits.to_le_bytes());
                let double = f64::from_le_bytes(double.as_slice().try_into().unwrap());
                assert_eq!(double, wanted);
            }
        }
    }

    /// The nearest of all short floats, found by looking at the two neighbours: ties to the even one.
    fn nearest(single: f32, exponent_bits: u32) -> u16 {
        let sign = u16::from(single.is_sign_negative()) << 15;
        let wanted = f64::from(single.abs());
        let infinite = ((1 << exponent_bits) - 1) << (15 - exponent_bits);
        let (mut low, mut high) = (0_u16, infinite);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if value(middle, exponent_bits) <= wanted { low = middle } else { high = middle }
        }
        // What would come after the largest: the place where rounding up becomes infinite.
        let above = match high == infinite {
            true => 2.0 * value(low, exponent_bits) - value(low - 1, exponent_bits),
            false => value(high, exponent_bits),
        };
        let (down, up) = (wanted - value(low, exponent_bits), above - wanted);
        let odd = low & 1 == 1;
        sign | if up < down || (up == down && odd) { high } else { low }
    }

    #[test]
    fn singles_round_to_the_nearest_and_ties_to_even() {
        let mut singles: Vec<f32> = Vec::new();
        let mut state = 1_u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            singles.push(f32::from_bits((state >> 32) as u32));
            // Near halves, of the range that F16 has.
            singles.push(f32::from_bits(
                0x3300_0000
                    + ((state >> 20) as u32 & 0x1fff_e000)
                    + ((state >> 60) as u32 & 3) * 0x800,
            ));
        }
        let edges = [0.0, -0.0, 65519.99, 65520.0, 65535.0, 6e-8, 2.98e-8, 2.9802322e-8, 6.1e-5];
        singles.extend(edges);
        singles.extend(
            [
                0x477f_efff,
                0x477f_f000,
                0x7f7f_ffff,
                0x3380_0000,
                0x3300_0000,
                0x3300_0001,
                0x387f_ffff,
                0x1,
            ]
            .map(f32::from_bits),
        );
        for single in singles.into_iter().filter(|single| single.is_finite()) {
            for (dtype, exponent_bits) in [(Dtype::F16, 5), (Dtype::BF16, 8)] {
                let got = of(Dtype::F32, dtype, &single.to_le_bytes());
                let got = u16::from_le_bytes([got[0], got[1]]);
                let bits = single.to_bits();
                assert_eq!(got, nearest(single, exponent_bits), "{single:e} {bits:08x} {dtype}");
            }
        }
    }

    #[test]
    fn infinities_and_nans_stay_what_they_are() {
        for (single, f16, bf16) in [
            (f32::INFINITY, 0x7c00, 0x7f80),
            (f32::NEG_INFINITY, 0xfc00, 0xff80),
            (f32::from_bits(0x7f80_0001), 0x7e00, 0x7fc0),
            (f32::from_bits(0xffff_ffff), 0xffff, 0xffff),
        ] {
            let bytes = single.to_le_bytes();
            assert_eq!(of(Dtype::F32, Dtype::F16, &bytes), u16::to_le_bytes(f16));
            assert_eq!(of(Dtype::F32, Dtype::BF16, &bytes), u16::to_le_bytes(bf16));
        }
        let double = of(Dtype::F64, Dtype::F32, &1e300_f64.to_le_bytes());
        assert_eq!(double, f32::INFINITY.to_le_bytes());
    }
}
