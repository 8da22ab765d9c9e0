//! From file blocks to a packed tile. The arithmetic is on words of four codes, because a model's whole file passes
//! through here at load; the file layouts are those of `ingle_tensor::quant`, which the tests hold this to.

use ingle_tensor::DType;

use super::spec::{Format, Min, Scale, Spec, TILE};

/// Accumulators of a row: unit `u` belongs to accumulator `u % RESIDUES`.
pub(super) const RESIDUES: usize = 8;

/// Units of accumulator `residue` in a row of `units`.
#[inline(always)]
pub(super) const fn units_of(units: usize, residue: usize) -> usize {
    (units + RESIDUES - 1 - residue) / RESIDUES
}

/// The units of a row in packed order: all of accumulator 0, then all of accumulator 1, ...
fn packed_order(units: usize) -> impl Iterator<Item = usize> {
    (0..RESIDUES).flat_map(move |residue| (0..units_of(units, residue)).map(move |i| residue + RESIDUES * i))
}

/// One unit of one row, between the two layouts.
struct Unit {
    /// Four codes to a word, first column in the lowest byte.
    words: [u32; 64],
    d: [u8; 2],
    min: [u8; 2],
    sub_scales: [u8; 16],
    sub_mins: [u8; 16],
}

/// Packs one tile: `rows` are the file bytes of up to 16 rows. Lanes without a row keep what is in `codes` and
/// `scales`, the two sections of the tile.
pub(super) fn pack_tile<F: Format>(rows: &[u8], row_bytes: usize, codes: &mut [u8], scales: &mut [u8]) {
    let spec = &const { F::SPEC };
    let block_bytes = const { F::SPEC.dtype.block_bytes() };
    let mut unit = Unit { words: [0; 64], d: [0; 2], min: [0; 2], sub_scales: [0; 16], sub_mins: [0; 16] };
    let order = packed_order(row_bytes / block_bytes);
    let records = codes
        .chunks_exact_mut(const { F::SPEC.code_bytes() })
        .zip(scales.chunks_exact_mut(spec.scale_bytes()));
    for (u, (codes, scales)) in order.zip(records) {
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            read_block(spec.dtype, &row[u * block_bytes..][..block_bytes], &mut unit);
            let groups = codes.chunks_exact_mut(const { F::SPEC.group_bytes() });
            for (group, words) in groups.zip(unit.words.as_chunks().0) {
                write_group(spec.bits, words, lane, group);
            }
            write_scales(spec, &unit, lane, scales);
        }
    }
}

#[inline(always)]
fn write_group(bits: usize, words: &[u32; 8], lane: usize, group: &mut [u8]) {
    let mut put = |plane: usize, word: u32| {
        let at = plane * 4 * TILE + 4 * lane;
        group[at..][..4].copy_from_slice(&word.to_le_bytes());
    };
    if bits == 8 {
        for (g, word) in words.iter().enumerate() {
            put(g, *word);
        }
        return;
    }
    for p in 0..4 {
        put(p, words[2 * p] & LOW4 | (words[2 * p + 1] & LOW4) << 4);
    }
    let high = |g: usize, mask: u32| words[g] >> 4 & mask;
    match bits {
        5 => put(4, (0..8).fold(0, |all, g| all | high(g, LOW1) << g)),
        6 => {
            for plane in 0..2 {
                put(4 + plane, (0..4).fold(0, |all, g| all | high(4 * plane + g, LOW2) << (2 * g)));
            }
        }
        _ => {}
    }
}

#[inline(always)]
fn write_scales(spec: &Spec, unit: &Unit, lane: usize, record: &mut [u8]) {
    if spec.scale == Scale::Exponent {
        record[lane] = unit.d[0];
        return;
    }
    let mut put = |at: usize, pair: [u8; 2]| record[at + 2 * lane..][..2].copy_from_slice(&pair);
    put(0, unit.d);
    if spec.min != Min::None {
        put(2 * TILE, unit.min);
    }
    for i in 0..spec.pairs() {
        put(spec.sub_scale_at() + 2 * TILE * i, [unit.sub_scales[2 * i], unit.sub_scales[2 * i + 1]]);
        if spec.min != Min::None {
            put(spec.sub_min_at() + 2 * TILE * i, [unit.sub_mins[2 * i], unit.sub_mins[2 * i + 1]]);
        }
    }
}

const LOW1: u32 = 0x0101_0101;
const LOW2: u32 = 0x0303_0303;
const LOW4: u32 = 0x0F0F_0F0F;

/// Little-endian word `i` of `bytes`.
#[inline(always)]
fn word(bytes: &[u8], i: usize) -> u32 {
    bytes[4 * i..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
}

/// Bits 0..4 of `bits` as bit 4 of each byte of a word.
#[inline(always)]
fn spread(bits: u32) -> u32 {
    ((bits & 15).wrapping_mul(0x0020_4081) & LOW1) << 4
}

#[inline(always)]
fn read_block(dtype: DType, block: &[u8], unit: &mut Unit) {
    let pair = |at: usize| [block[at], block[at + 1]];
    let words = &mut unit.words;
    // Codes of 32 values: byte i has value i in its low and value i + 16 in its high nibble.
    let nibbles = |words: &mut [u32; 64], at: usize| {
        for g in 0..4 {
            let both = word(&block[at..], g);
            words[g] = both & LOW4;
            words[g + 4] = both >> 4 & LOW4;
        }
    };
    let high_bits = |words: &mut [u32; 64], at: usize| {
        let bits = word(&block[at..], 0);
        for g in 0..8 {
            words[g] |= spread(bits >> (4 * g));
        }
    };
    unit.d = pair(0);
    match dtype {
        DType::Q4_0 | DType::IQ4NL => nibbles(words, 2),
        DType::MXFP4 => nibbles(words, 1),
        DType::Q4_1 => {
            unit.min = pair(2);
            nibbles(words, 4);
        }
        DType::Q5_0 => {
            nibbles(words, 6);
            high_bits(words, 2);
        }
        DType::Q5_1 => {
            unit.min = pair(2);
            nibbles(words, 8);
            high_bits(words, 4);
        }
        DType::Q8_0 => {
            for g in 0..8 {
                words[g] = word(&block[2..], g) ^ 0x8080_8080;
            }
        }
        DType::Q4K | DType::Q5K => {
            unit.min = pair(2);
            read_sub_scales(&block[4..16], unit);
            let five = dtype == DType::Q5K;
            let codes = if five { 48 } else { 16 };
            for i in 0..64 {
                let (j, g) = (i / 8, i % 8);
                unit.words[i] = word(&block[codes..], j / 2 * 8 + g) >> (4 * (j % 2)) & LOW4;
                if five {
                    unit.words[i] |= (word(&block[16..], g) >> j & LOW1) << 4;
                }
            }
        }
        DType::IQ4XS => {
            let (low, high) = (word(&block[4..], 0), u32::from(u16::from_le_bytes(pair(2))));
            for (j, words) in unit.words.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let bits = low >> (4 * j) & 15 | (high >> (2 * j) & 3) << 4;
                unit.sub_scales[j] = (bits as u8).wrapping_sub(32);
                for g in 0..4 {
                    let both = word(&block[8..], 4 * j + g);
                    words[g] = both & LOW4;
                    words[g + 4] = both >> 4 & LOW4;
                }
            }
        }
        DType::Q6K => {
            for i in 0..64 {
                let (half, r, g) = (i / 32, i / 8 % 4, i % 8);
                let low = word(block, 16 * half + 8 * (r % 2) + g) >> (4 * (r / 2)) & LOW4;
                let high = word(&block[128..], 8 * half + g) >> (2 * r) & LOW2;
                unit.words[i] = low | high << 4;
            }
            unit.sub_scales.copy_from_slice(&block[192..208]);
            unit.d = pair(208);
        }
        _ => unreachable!("{dtype} has no packed form; Packed::new refuses it"),
    }
}

/// Eight 6-bit (sub-scale, sub-minimum) pairs of Q4_K and Q5_K.
#[inline(always)]
fn read_sub_scales(packed: &[u8], unit: &mut Unit) {
    for j in 0..4 {
        let (low, mid, high) = (packed[j], packed[j + 4], packed[j + 8]);
        unit.sub_scales[j] = low & 63;
        unit.sub_mins[j] = mid & 63;
        unit.sub_scales[j + 4] = high & 15 | low >> 6 << 4;
        unit.sub_mins[j + 4] = high >> 4 | mid >> 6 << 4;
    }
}
