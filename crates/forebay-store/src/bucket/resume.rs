//! Going on with an upload that another process began and did not end: part by part, where the store is S3.
//!
//! What there is of it the store is asked (`GET /BUCKET?uploads`, `GET /KEY?uploadId=..`). A part is taken as it is
//! only if the store's own sum of it is that of the bytes that are to be there, which whoever goes on has at hand: the
//! CRC-64/NVME that the store computed when it took the part, or where it tells none the entity tag, which is the MD5
//! of a part on S3 and most of its kin. Where the tag is something else (KMS keys make it so) nothing is ever the
//! same, and all is sent again. Parts of another length are passed over.
//!
//! At the end the store is asked once more, and the object is made of what it lists then: every part must have the sum
//! of what was to be sent. The tags and sums go with that request, so a part that somebody replaces in that instant is
//! refused by the store. Only where no part was taken as it is, and so nothing says that tags are MD5s here, parts
//! count by their lengths: this process has sent them all.
//!
//! Who began it may be alive after all (a machine that was taken for lost): then both send the same parts under the
//! same numbers, one of them ends the upload, and the other is told that there is no such upload. What counts is what
//! is at the key then, as always.
//!
//! Uploads are found by their key, so a key must be of one attempt, and of one file of it. Of several the one with the
//! most parts is taken; the others are a collector's. Azure tells no sums of blocks that were not committed, and how
//! GCS lists parts the crate does not say: there, and where uploads are not listed, all is sent again.

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use http::Method;
use md5::{Digest, Md5};
use serde::Deserialize;

use super::client::Client;
use super::failure::Failed;
use super::unfinished::Unfinished;

/// Parts in one answer: S3's limit.
const PAGE: u64 = 1000;
/// Answers that are read: all parts that there may be, and one.
const PAGES_MAX: usize = 11;
/// Uploads of one key that are looked at.
const UPLOADS_MAX: usize = 8;
/// Those whose keys start alike, which come with them in a list.
const ALIKE_MAX: usize = 10_000;
/// Most bytes of an answer; a part takes some 300.
const ANSWER_BYTES: u64 = 1 << 20;

/// How parts are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SumKind {
    Crc64,
    Md5,
}

impl SumKind {
    /// As the store writes it.
    pub(super) fn of(self, bytes: &[u8]) -> String {
        match self {
            Self::Crc64 => {
                base64(&crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes).to_be_bytes())
            }
            Self::Md5 => Md5::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect(),
        }
    }
}

/// What the store has of an upload.
#[derive(Debug)]
pub(super) struct Begun {
    /// The store's name of the upload.
    pub(super) id: String,
    pub(super) kind: SumKind,
    /// By index; of the right length.
    parts: Vec<Option<Part>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    e_tag: String,
    sum: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    #[serde(default)]
    is_truncated: bool,
    #[serde(default)]
    next_part_number_marker: Option<String>,
    #[serde(default, rename = "Part")]
    parts: Vec<Listed>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listed {
    part_number: u64,
    #[serde(rename = "ETag")]
    e_tag: String,
    size: u64,
    #[serde(rename = "ChecksumCRC64NVME")]
    crc64: Option<String>,
}

impl Begun {
    /// Whether the store has these bytes as that part.
    pub(super) fn has(&self, index: usize, sum: &str) -> bool {
        self.parts.get(index).and_then(Option::as_ref).is_some_and(|part| part.sum == sum)
    }

    fn count(&self) -> usize {
        self.parts.iter().flatten().count()
    }

    /// Of the lines of a list, those whose length is right; `None` where there are none.
    fn of(
        id: &str,
        lines: &[Listed],
        kind: Option<SumKind>,
        lens: &dyn Fn(usize) -> Option<u64>,
    ) -> Option<Self> {
        let has_crc = || lines.iter().all(|line| line.crc64.is_some());
        let kind = kind.unwrap_or(if has_crc() { SumKind::Crc64 } else { SumKind::Md5 });
        let mut parts = Vec::new();
        for line in lines {
            let index = usize::try_from(line.part_number.checked_sub(1)?).ok()?;
            if lens(index) != Some(line.size) {
                continue;
            }
            let sum = match kind {
                SumKind::Crc64 => line.crc64.clone(),
                SumKind::Md5 => Some(line.e_tag.trim_matches('"').to_ascii_lowercase()),
            };
            let Some(sum) = sum else { continue };
            if parts.len() <= index {
                parts.resize(index + 1, None);
            }
            if let Some(slot) = parts.get_mut(index) {
                *slot = Some(Part { e_tag: line.e_tag.clone(), sum });
            }
        }
        let begun = Self { id: id.to_owned(), kind, parts };
        (begun.count() > 0).then_some(begun)
    }

    /// The body that makes an object of them: `sums` of all parts, in their order. `kept`: whether some were taken as
    /// they are. Errors: the index of one that the store does not have so.
    fn completion(&self, sums: &[String], kept: bool) -> Result<String, usize> {
        let compares = kept || self.kind == SumKind::Crc64;
        let mut body = String::from(
            "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">",
        );
        for (index, sum) in sums.iter().enumerate() {
            let part = self.parts.get(index).and_then(Option::as_ref);
            let part = part.filter(|part| !compares || part.sum == *sum).ok_or(index)?;
            let e_tag = quick_xml::escape::escape(&part.e_tag);
            body.push_str(&format!("<Part><PartNumber>{}</PartNumber>", index + 1));
            body.push_str(&format!("<ETag>{e_tag}</ETag>"));
            if self.kind == SumKind::Crc64 {
                body.push_str(&format!("<ChecksumCRC64NVME>{sum}</ChecksumCRC64NVME>"));
            }
            body.push_str("</Part>");
        }
        body.push_str("</CompleteMultipartUpload>");
        Ok(body)
    }
}

impl Client {
    /// What was begun under a key, if the store can tell; `lens` are the lengths of its parts. Whatever goes wrong,
    /// there is nothing to go on with.
    pub(super) async fn begun(
        &self,
        key: &str,
        lens: &dyn Fn(usize) -> Option<u64>,
    ) -> Option<Begun> {
        let found = match self.unfinished(key, ALIKE_MAX).await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, key, "what was begun is not known: it is sent again");
                return None;
            }
        };
        let mut best: Option<Begun> = None;
        let own = found.iter().filter(|upload| upload.key == key);
        for upload in own.take(UPLOADS_MAX) {
            match self.list_parts(upload).await {
                Ok(lines) => {
                    let begun = Begun::of(upload.id(), &lines, None, lens);
                    let more =
                        |begun: &Begun| best.as_ref().is_none_or(|b| b.count() < begun.count());
                    if let Some(begun) = begun.filter(more) {
                        best = Some(begun);
                    }
                }
                Err(failed) => tracing::debug!(error = %failed.error, key, "parts are not listed"),
            }
        }
        if let Some(begun) = &best {
            tracing::debug!(key, parts = begun.count(), "an upload is gone on with");
        }
        best
    }

    async fn list_parts(&self, upload: &Unfinished) -> Result<Vec<Listed>, Failed> {
        let permanent = |error: Error| Failed::permanent(error.at(self.place(&upload.key)));
        let unreadable =
            || permanent(Error::new(Code::Io, "a list of parts that is not to be read"));
        let uploads = self.uploads_by_hand.as_ref().ok_or_else(unreadable)?;
        let mut url = uploads.of(&self.full(&upload.key), upload.id()).map_err(permanent)?;
        let base = url.clone();
        let mut lines = Vec::new();
        for _ in 0..PAGES_MAX {
            let ask = self.ask("cannot list the parts of an upload", &upload.key, ANSWER_BYTES);
            let (body, _) =
                self.retries.ask_beside(&ask, || uploads.ask(Method::GET, &url)).await?;
            let text = std::str::from_utf8(&body).map_err(|_| unreadable())?;
            let answer: Answer = quick_xml::de::from_str(text).map_err(|_| unreadable())?;
            if answer.parts.len() as u64 > PAGE {
                return Err(unreadable());
            }
            lines.extend(answer.parts);
            let next = answer.next_part_number_marker.filter(|_| answer.is_truncated);
            let Some(next) = next else { return Ok(lines) };
            url = base.clone();
            url.query_pairs_mut().append_pair("part-number-marker", &next);
        }
        Err(unreadable())
    }

    /// Makes an object of an upload that was gone on with: `sums` of all its parts, `lens` their lengths; `kept`:
    /// whether some were taken as they are.
    pub(super) async fn complete_begun(
        &self,
        key: &str,
        begun: &Begun,
        (sums, kept): (&[String], bool),
        lens: &dyn Fn(usize) -> Option<u64>,
    ) -> Result<(), Failed> {
        let permanent =
            |what: String| Failed::permanent(Error::new(Code::Io, what).at(self.place(key)));
        let upload = Unfinished::new(key, &begun.id);
        let lines = self.list_parts(&upload).await?;
        let there = Begun::of(&begun.id, &lines, Some(begun.kind), lens);
        let there = there.ok_or_else(|| permanent("the parts of an upload are gone".to_owned()))?;
        let body = there.completion(sums, kept).map_err(|index| {
            permanent(format!("part {} in the store is not what was to be sent", index + 1))
        })?;
        let lost = || permanent("uploads of this store are not ended by hand".to_owned());
        let uploads = self.uploads_by_hand.as_ref().ok_or_else(lost)?;
        let url = uploads.of(&self.full(key), &begun.id).map_err(Failed::permanent)?;
        let bytes: u64 = (0..sums.len()).filter_map(lens).sum();
        let ask = self.ask("cannot complete an upload", key, bytes / 64);
        let body = Bytes::from(body);
        let request = || async {
            let answer = uploads.ask_with(Method::POST, &url, body.clone()).await?;
            // S3 begins its answer before it knows the end, so a failure may come with a 200.
            match String::from_utf8_lossy(&answer).contains("<Error>") {
                true => Err(super::unfinished::generic("an upload was not completed")),
                false => Ok(()),
            }
        };
        self.retries.ask(&ask, request).await.map(drop)
    }
}

/// Of some bytes, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let at = |index: usize| u32::from(three.get(index).copied().unwrap_or(0));
        let word = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            let value = (word >> (18 - 6 * digit)) as usize % 64;
            let is_there = digit <= three.len();
            text.push(if is_there { char::from(DIGITS[value]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_stores() {
        // The check values of both, of "123456789".
        assert_eq!(SumKind::Md5.of(b"123456789"), "25f9e794323b453885f5181f1b624d0b");
        assert_eq!(
            SumKind::Crc64.of(b"123456789"),
            base64(&0xae8b_1486_0a79_9888_u64.to_be_bytes())
        );
        for (bytes, text) in [(&b"f"[..], "Zg=="), (b"fo", "Zm8="), (b"foo", "Zm9v"), (b"", "")] {
            assert_eq!(base64(bytes), text);
        }
    }

    const LIST: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
        <ListPartsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Bucket>b</Bucket>
        <Key>k</Key><UploadId>u</UploadId><PartNumberMarker>0</PartNumberMarker>
        <NextPartNumberMarker>3</NextPartNumberMarker><MaxParts>1000</MaxParts>
        <IsTruncated>false</IsTruncated>
        <Part><PartNumber>1</PartNumber><LastModified>x</LastModified><ETag>&quot;A1&quot;</ETag>
        <Size>10</Size><ChecksumCRC64NVME>one</ChecksumCRC64NVME></Part>
        <Part><PartNumber>3</PartNumber><ETag>"a3"</ETag><Size>4</Size>
        <ChecksumCRC64NVME>three</ChecksumCRC64NVME></Part></ListPartsResult>"#;

    fn lens(index: usize) -> Option<u64> {
        [10, 10, 4].get(index).copied()
    }

    #[test]
    fn parts_count_by_their_sum_and_length() {
        let answer: Answer = quick_xml::de::from_str(LIST).unwrap();
        assert!(!answer.is_truncated);
        let begun = Begun::of("u", &answer.parts, None, &lens).unwrap();
        assert_eq!((begun.kind, begun.count()), (SumKind::Crc64, 2));
        assert!(begun.has(0, "one") && begun.has(2, "three"));
        assert!(!begun.has(0, "three") && !begun.has(1, "") && !begun.has(7, "one"));
        // Another length; no part 0; nothing of use.
        let short = Begun::of("u", &answer.parts, None, &|_| Some(10)).unwrap();
        assert!(short.has(0, "one") && !short.has(2, "three"));
        assert!(Begun::of("u", &answer.parts, None, &|_| None).is_none());
        assert!(Begun::of("u", &[], None, &lens).is_none());
        let zero = [Listed { part_number: 0, e_tag: String::new(), size: 10, crc64: None }];
        assert!(Begun::of("u", &zero, None, &lens).is_none());
    }

    #[test]
    fn without_a_checksum_the_tag_is_compared() {
        let text = LIST.replace("<ChecksumCRC64NVME>three</ChecksumCRC64NVME>", "");
        let answer: Answer = quick_xml::de::from_str(&text).unwrap();
        let begun = Begun::of("u", &answer.parts, None, &lens).unwrap();
        assert_eq!(begun.kind, SumKind::Md5);
        assert!(begun.has(0, "a1") && begun.has(2, "a3") && !begun.has(0, "one"));
    }

    #[test]
    fn tags_that_are_no_md5_are_taken_for_what_was_sent_if_all_was() {
        let answer: Answer = quick_xml::de::from_str(LIST).unwrap();
        let begun = Begun::of("u", &answer.parts, Some(SumKind::Md5), &lens).unwrap();
        let sums = ["a-real-md5".to_owned()];
        assert_eq!(begun.completion(&sums, true), Err(0));
        assert!(begun.completion(&sums, false).unwrap().contains("<ETag>&quot;A1&quot;</ETag>"));
        assert_eq!(begun.completion(&["".to_owned(), "".to_owned()], false), Err(1), "not there");
    }

    #[test]
    fn an_object_is_made_of_parts_that_are_all_as_they_should_be() {
        let answer: Answer = quick_xml::de::from_str(LIST).unwrap();
        let begun = Begun::of("u", &answer.parts, None, &lens).unwrap();
        let sums = |words: [&str; 3]| words.map(str::to_owned);
        for kept in [true, false] {
            assert_eq!(begun.completion(&sums(["one", "two", "three"]), kept), Err(1), "not there");
            assert_eq!(begun.completion(&sums(["two", "two", "three"]), kept), Err(0), "another");
        }
        let body = begun.completion(&sums(["one", "", ""])[..1], true).unwrap();
        let part = "<Part><PartNumber>1</PartNumber><ETag>&quot;A1&quot;</ETag>\
                    <ChecksumCRC64NVME>one</ChecksumCRC64NVME></Part>";
        assert!(body.contains(part), "{body}");
    }
}
