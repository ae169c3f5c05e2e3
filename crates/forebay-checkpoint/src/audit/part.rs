//! One rank's part.

use std::collections::HashMap;

use super::crc::crc;
use super::cursor::{Check, Cursor};
use super::cuts::Cut;
use super::rows::{self, Row};

pub(super) struct File {
    pub(super) name: String,
    pub(super) bytes: u64,
}

pub(super) enum Place {
    Implied,
    Whole,
    Box(Cut),
}

pub(super) struct Chunk {
    /// The number of the value; own values count on after the shared ones.
    pub(super) value: u64,
    pub(super) place: Place,
    pub(super) file: usize,
    /// First byte of the item, first byte of the elements, end of the elements, end of the item.
    pub(super) item: [u64; 4],
}

impl Chunk {
    pub(super) fn data_bytes(&self) -> u64 {
        self.item[2] - self.item[1]
    }
}

pub(super) struct Part {
    pub(super) attempt: String,
    pub(super) rank: u64,
    pub(super) world: u64,
    pub(super) structure: Option<([u8; 32], u64)>,
    pub(super) files: Vec<File>,
    pub(super) own: Vec<Row>,
    pub(super) chunks: Vec<Chunk>,
}

impl Part {
    pub(super) fn read(bytes: &[u8]) -> Check<Self> {
        let mut cursor = Cursor(bytes);
        if cursor.slice(8)? != [0x89, b'F', b'B', b'P', 0x0D, 0x0A, 0x1A, 0x0A] {
            return Err("wrong magic".into());
        }
        let major = cursor.little(2)?;
        if major != 1 {
            return Err(format!("major version {major}"));
        }
        let _minor = cursor.little(2)?;
        if cursor.crc()? != crc(cursor.0) {
            return Err("wrong checksum".into());
        }
        if cursor.little(8)? != bytes.len() as u64 {
            return Err("another length than it says".into());
        }
        let mut fields: HashMap<u64, &[u8]> = HashMap::new();
        let mut last = 0;
        while !cursor.0.is_empty() {
            let tag = cursor.varint()?;
            if tag <= last {
                return Err("fields out of order".into());
            }
            last = tag;
            let len = cursor.varint()?;
            fields.insert(tag, cursor.slice(len)?);
        }
        let field = |tag| fields.get(&tag).copied().ok_or(format!("field {tag} is missing"));
        let mut who = Cursor(field(1)?);
        let (attempt, rank, world) = (who.text()?.to_owned(), who.varint()?, who.varint()?);
        who.done()?;
        let structure = match fields.get(&2) {
            None => None,
            Some(field) => {
                let mut cursor = Cursor(field);
                let both = (cursor.digest()?, cursor.varint()?);
                cursor.done()?;
                Some(both)
            }
        };
        let files = files(field(3)?)?;
        let mut list = Cursor(field(4)?);
        let own = rows::read(&mut list, |_, _| Ok(()))?.into_iter().map(|(row, ())| row).collect();
        list.done()?;
        let chunks = chunks(field(5)?, files.len())?;
        let blocks: u64 = chunks.iter().map(|chunk| chunk.data_bytes().div_ceil(1 << 20)).sum();
        if field(6)?.len() as u64 != blocks * 4 {
            return Err(format!("{} bytes of checksums for {blocks} blocks", field(6)?.len()));
        }
        Ok(Self { attempt, rank, world, structure, files, own, chunks })
    }
}

fn files(field: &[u8]) -> Check<Vec<File>> {
    let mut cursor = Cursor(field);
    let mut files = Vec::new();
    for _ in 0..cursor.count()? {
        let (name, bytes) = (cursor.text()?.to_owned(), cursor.varint()?);
        match cursor.byte()? {
            0 => {}
            1 => {
                cursor.crc()?;
            }
            other => return Err(format!("a checksum of kind {other}")),
        }
        files.push(File { name, bytes });
    }
    cursor.done()?;
    Ok(files)
}

fn chunks(field: &[u8], files: usize) -> Check<Vec<Chunk>> {
    let mut cursor = Cursor(field);
    let count = cursor.count()?;
    let mut file_of = Vec::new();
    for file in 0..files {
        for _ in 0..cursor.varint()? {
            if file_of.len() == count {
                return Err("more chunks in files than in all".into());
            }
            file_of.push(file);
        }
    }
    if file_of.len() != count {
        return Err("fewer chunks in files than in all".into());
    }
    let mut columns: [Vec<u64>; 5] = Default::default();
    for (column, by_difference) in columns.iter_mut().zip([true, false, false, false, true]) {
        let mut last = 0;
        for _ in 0..count {
            last = if by_difference { cursor.difference(last)? } else { cursor.varint()? };
            column.push(last);
        }
    }
    let places = places(&mut cursor, count)?;
    cursor.done()?;
    let [values, gaps, leads, bytes, tails] = columns;
    let rows = values.into_iter().zip(gaps).zip(leads).zip(bytes).zip(tails);
    let (mut chunks, mut here, mut end) = (Vec::new(), 0, 0u64);
    for ((((((value, gap), lead), bytes), tail), place), file) in rows.zip(places).zip(file_of) {
        if file != here {
            (here, end) = (file, 0);
        }
        let mut item = [0; 4];
        for (mark, step) in item.iter_mut().zip([gap, lead, bytes, tail]) {
            end = end.checked_add(step).ok_or("a chunk that ends past 2^64")?;
            *mark = end;
        }
        chunks.push(Chunk { value, place, file, item });
    }
    Ok(chunks)
}

fn places(cursor: &mut Cursor<'_>, count: usize) -> Check<Vec<Place>> {
    let mut kinds = Vec::new();
    while kinds.len() < count {
        let (kind, run) = (cursor.varint()?, cursor.varint()?);
        if run == 0 || run > (count - kinds.len()) as u64 || kind > 2 {
            return Err(format!("a run of {run} chunks of kind {kind}"));
        }
        kinds.extend((0..run).map(|_| kind));
    }
    let mut places = Vec::new();
    for kind in kinds {
        places.push(match kind {
            0 => Place::Implied,
            1 => Place::Whole,
            _ => {
                let (mut offsets, mut sizes) = (Vec::new(), Vec::new());
                for _ in 0..cursor.count()? {
                    offsets.push(cursor.varint()?);
                    sizes.push(cursor.varint()?);
                }
                Place::Box((offsets, sizes))
            }
        });
    }
    Ok(places)
}
