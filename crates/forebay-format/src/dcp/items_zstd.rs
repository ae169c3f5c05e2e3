//! zstd streams, decoded in memory up to a limit.

use forebay_error::{Code, Error, Result};
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use std::io::Read;

/// Decodes all frames of a stream. More than `most` bytes, or a checksum that does not fit, is an error.
pub(super) fn decode(stream: &[u8], most: u64) -> Result<Vec<u8>> {
    let mut rest = stream;
    let mut decoded = Vec::new();
    while !rest.is_empty() {
        match StreamingDecoder::new(&mut rest) {
            Ok(decoder) => frame(decoder, most, &mut decoded)?,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                rest = rest.get(length as usize..).ok_or_else(|| damaged("it is cut short"))?;
            }
            Err(error) => return Err(damaged(error)),
        }
    }
    Ok(decoded)
}

fn frame(
    mut decoder: StreamingDecoder<&mut &[u8], FrameDecoder>,
    most: u64,
    decoded: &mut Vec<u8>,
) -> Result<()> {
    // One byte more than allowed tells that there is more.
    let left = most.saturating_sub(decoded.len() as u64).saturating_add(1);
    decoder.by_ref().take(left).read_to_end(decoded).map_err(damaged)?;
    if decoded.len() as u64 > most {
        let what = format!("a zstd stream holds more than the {most} bytes that it may");
        return Err(Error::new(Code::InvalidItem, what));
    }
    let frame = decoder.into_frame_decoder();
    let (said, found) = (frame.get_checksum_from_data(), frame.get_calculated_checksum());
    match said.is_none() || said == found {
        true => Ok(()),
        false => Err(Error::new(Code::Checksum, "the checksum of a zstd stream does not fit")),
    }
}

fn damaged(error: impl std::fmt::Display) -> Error {
    Error::new(Code::InvalidItem, format!("a zstd stream is damaged: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    fn packed(bytes: &[u8]) -> Vec<u8> {
        compress_to_vec(bytes, CompressionLevel::Fastest)
    }

    #[test]
    fn frames_are_joined_and_bounded() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at / 50) as u8).collect();
        let stream = [packed(&bytes), packed(b"tail")].concat();
        let all = decode(&stream, 100_004).unwrap();
        assert_eq!((&all[..100_000], &all[100_000..]), (bytes.as_slice(), b"tail".as_slice()));
        assert_eq!(decode(&stream, 100_003).unwrap_err().code(), Code::InvalidItem);
        assert_eq!(decode(b"", 10).unwrap(), b"");
        // A skippable frame of three bytes in front.
        let skipped = [&[0x50, 0x2A, 0x4D, 0x18, 3, 0, 0, 0, 1, 2, 3][..], &stream].concat();
        assert_eq!(decode(&skipped, 100_004).unwrap(), all);
    }

    #[test]
    fn a_small_stream_cannot_ask_for_much() {
        let bomb = packed(&vec![0; 64 << 20]);
        assert!(bomb.len() < 1 << 20);
        assert_eq!(decode(&bomb, 1 << 16).unwrap_err().code(), Code::InvalidItem);
    }

    #[test]
    fn damage_is_an_error_at_every_byte() {
        let bytes: Vec<u8> = (0..3000_u32).map(|at| (at * at / 7) as u8).collect();
        let stream = packed(&bytes);
        for cut in 1..stream.len() {
            assert!(decode(&stream[..cut], 4000).is_err(), "cut to {cut} bytes");
        }
        for at in 0..stream.len() {
            let mut damaged = stream.clone();
            damaged[at] ^= 0x10;
            assert!(decode(&damaged, 4000).map_or(true, |read| read == bytes), "byte {at}");
        }
    }
}
