//! The header of a manifest: what it is, how long, and where its sections are.
//!
//! ```text
//! header    8 bytes magic, 89 "FBM" 0D 0A 1A 0A: no text, and damaged by whatever converts line ends
//!           u16 major version, u16 minor version
//!           u32 bytes of the header
//!           u64 bytes of the manifest
//!           u32 number of sections
//!           sections, 24 bytes each: u32 id, u32 CRC-32 of its bytes, u64 offset, u64 bytes
//!           u32 CRC-32 of all that precedes it
//! ```
//!
//! Sections lie in the order of the table, the first right behind the header, each right behind the one before, and
//! the last ends the manifest: every byte belongs to one of them. The ids 1 to 6 are there once each and in this
//! order; those of later minor versions may stand anywhere, and are passed over.

use std::ops::Range;

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;

use super::limits::{MAX_HEAD_BYTES, MAX_SECTIONS};
use super::version::{MAJOR, MINOR, check_version};
use super::wire::Take;

const MAGIC: &[u8; 8] = b"\x89FBM\r\n\x1a\n";
const FIXED_BYTES: u64 = 28;
const SECTION_BYTES: u64 = 24;
const CRC_BYTES: u64 = 4;

/// Bytes that hold any header.
pub(crate) const MAX_HEADER_BYTES: u64 = FIXED_BYTES + MAX_SECTIONS * SECTION_BYTES + CRC_BYTES;

/// What the sections hold, by their ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Id {
    /// JSON text, see `info`.
    Info = 1,
    /// See `meshes`.
    Meshes = 2,
    /// The tensor table: rows with holders, see `rows` and `holders`.
    Table = 3,
    /// Where the parts are, see `index`.
    Index = 4,
    /// Longer lists of holders, see `holders`.
    Holders = 5,
    /// The parts of all ranks, one after the other, see `part_codec`.
    Parts = 6,
}

/// The sections that a reader takes in when it opens a manifest, in their order.
pub(crate) const EAGER: [Id; 4] = [Id::Info, Id::Meshes, Id::Table, Id::Index];
const KNOWN: [Id; 6] = [Id::Info, Id::Meshes, Id::Table, Id::Index, Id::Holders, Id::Parts];

/// A section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) id: u32,
    pub(crate) crc: u32,
    pub(crate) bytes: Range<u64>,
}

/// A header that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    sections: Vec<Section>,
}

impl Header {
    /// Lays out sections of these (id, CRC-32, bytes).
    pub(crate) fn lay_out(sections: &[(Id, u32, u64)]) -> Self {
        let mut start = header_bytes(sections.len() as u64);
        let place = |&(id, crc, bytes): &(Id, u32, u64)| {
            let here = start..start + bytes;
            start = here.end;
            Section { id: id as u32, crc, bytes: here }
        };
        Self { sections: sections.iter().map(place).collect() }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let header_len = header_bytes(self.sections.len() as u64);
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&MAJOR.to_le_bytes());
        out.extend_from_slice(&MINOR.to_le_bytes());
        // 64 sections at most: both fit.
        out.extend_from_slice(&(header_len as u32).to_le_bytes());
        out.extend_from_slice(&self.total().to_le_bytes());
        out.extend_from_slice(&(self.sections.len() as u32).to_le_bytes());
        for section in &self.sections {
            out.extend_from_slice(&section.id.to_le_bytes());
            out.extend_from_slice(&section.crc.to_le_bytes());
            out.extend_from_slice(&section.bytes.start.to_le_bytes());
            out.extend_from_slice(&(section.bytes.end - section.bytes.start).to_le_bytes());
        }
        let crc = crc32(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads the header from the first bytes of a manifest that has `total` bytes.
    pub(crate) fn decode(start: &[u8], total: u64, place: &str) -> Result<Self> {
        let short = || Error::new(Code::Truncated, "a manifest ends inside its header").at(place);
        let fixed = start.get(..FIXED_BYTES as usize).ok_or_else(short)?;
        let mut take = Take::new(fixed, place);
        if take.take(8)? != MAGIC {
            return Err(Error::new(Code::InvalidMetadata, "not a manifest").at(place));
        }
        check_version(&mut take, "manifest")?;
        let (header_len, said, count) = (take.u32()?, take.u64()?, u64::from(take.u32()?));
        if count > MAX_SECTIONS || u64::from(header_len) != header_bytes(count) {
            return Err(take.bad(format!("a header of {header_len} bytes with {count} sections")));
        }
        let bytes = start.get(..header_len as usize).ok_or_else(short)?;
        let (table, crc) = bytes.split_at(bytes.len() - CRC_BYTES as usize);
        if Take::new(crc, place).u32()? != crc32(table) {
            let what = "the header of a manifest does not have its checksum";
            return Err(Error::new(Code::Checksum, what).at(place));
        }
        check_length(total, said).map_err(|error| error.at(place))?;
        let mut take = Take::new(table.get(FIXED_BYTES as usize..).unwrap_or_default(), place);
        let mut sections = Vec::with_capacity(count as usize);
        let mut end = u64::from(header_len);
        for _ in 0..count {
            let section = take_section(&mut take)?;
            if section.bytes.start != end || section.bytes.end > total {
                return Err(take.bad(format!("section {} is not in its place", section.id)));
            }
            end = section.bytes.end;
            sections.push(section);
        }
        if end != total {
            return Err(take.bad(format!("sections end at byte {end} of {total}")));
        }
        let header = Self { sections };
        header.check_ids().map_err(|error| error.at(place))?;
        Ok(header)
    }

    fn check_ids(&self) -> Result<()> {
        let known = self.sections.iter().filter(|section| KNOWN.iter().any(|&id| section.is(id)));
        if !known.map(|section| section.id).eq(KNOWN.map(|id| id as u32)) {
            let what = "sections of a manifest are missing, twice there or out of order";
            return Err(Error::new(Code::InvalidMetadata, what));
        }
        match self.eager_bytes() <= MAX_HEAD_BYTES {
            true => Ok(()),
            false => Err(Error::new(Code::Unsupported, "a manifest with more than 1 GiB of names")),
        }
    }

    /// All sections, in their order.
    pub(crate) fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Bytes of the manifest.
    pub(crate) fn total(&self) -> u64 {
        self.sections.last().map_or(0, |section| section.bytes.end)
    }

    /// All that a reader takes in when it opens the manifest, and what its seal is the hash of: everything before the
    /// longer lists of holders.
    pub(crate) fn eager_bytes(&self) -> u64 {
        self.section(Id::Holders).bytes.start
    }

    /// A section; all of them are there.
    pub(crate) fn section(&self, id: Id) -> Section {
        let found = self.sections.iter().find(|section| section.is(id)).cloned();
        found.unwrap_or(Section { id: id as u32, crc: 0, bytes: 0..0 })
    }
}

impl Section {
    fn is(&self, id: Id) -> bool {
        self.id == id as u32
    }

    /// Its bytes out of those of a manifest's start, checked.
    pub(crate) fn of<'a>(&self, bytes: &'a [u8], place: &str) -> Result<&'a [u8]> {
        let start = usize::try_from(self.bytes.start).ok();
        let end = usize::try_from(self.bytes.end).ok();
        let own = start.zip(end).and_then(|(start, end)| bytes.get(start..end));
        let Some(own) = own else {
            return Err(Error::new(Code::Truncated, "a manifest ends inside a section").at(place));
        };
        self.check(crc32(own), place)?;
        Ok(own)
    }

    /// Fails where its bytes have another checksum than it says.
    pub(crate) fn check(&self, crc: u32, place: &str) -> Result<()> {
        if crc == self.crc {
            return Ok(());
        }
        let what = format!("section {} of a manifest does not have its checksum", self.id);
        Err(Error::new(Code::Checksum, what).at(place))
    }
}

fn take_section(take: &mut Take<'_>) -> Result<Section> {
    let (id, crc, start, len) = (take.u32()?, take.u32()?, take.u64()?, take.u64()?);
    let Some(end) = start.checked_add(len) else {
        return Err(take.bad(format!("section {id} ends past 2^64")));
    };
    Ok(Section { id, crc, bytes: start..end })
}

fn check_length(total: u64, said: u64) -> Result<()> {
    let what = format!("a manifest of {total} bytes says that it has {said}");
    match total.cmp(&said) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Less => Err(Error::new(Code::Truncated, what)),
        std::cmp::Ordering::Greater => Err(Error::new(Code::TrailingBytes, what)),
    }
}

fn header_bytes(sections: u64) -> u64 {
    FIXED_BYTES + sections * SECTION_BYTES + CRC_BYTES
}
