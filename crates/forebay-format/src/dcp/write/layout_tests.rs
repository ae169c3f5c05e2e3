//! Layouts against the plain model of a file: all of its bytes, written segment by segment.

use forebay_error::Result;
use proptest::prelude::*;

use super::*;
use crate::crc::crc32;

/// Items with bytes that tell which they are.
struct Memory(Vec<Vec<u8>>);

impl Memory {
    fn of(items: &[ItemSpec]) -> Self {
        let bytes = |item: &ItemSpec| match item {
            ItemSpec::Tensor { dtype, shape } => dtype.size(shape).unwrap().1,
            ItemSpec::Bytes(bytes) => *bytes,
        };
        let fill = |(index, item)| {
            (0..bytes(item)).map(|at| (at * 7 + index as u64 * 31 + (at >> 8)) as u8).collect()
        };
        Self(items.iter().enumerate().map(fill).collect())
    }
}

impl GlueSource for Memory {
    fn crc(&self, index: usize) -> u32 {
        crc32(&self.0[index])
    }

    fn copy(&self, index: usize, from: u64, into: &mut [u8]) -> Result<()> {
        into.copy_from_slice(&self.0[index][from as usize..][..into.len()]);
        Ok(())
    }
}

/// The file as direct I/O would write it: whole blocks, each once, then cut.
fn written(file: &FileLayout, memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0xEE; file.len.next_multiple_of(FILE_ALIGN) as usize];
    let mut done = 0;
    for segment in &file.segments {
        assert_eq!(segment.offset(), done, "a gap, or bytes written twice");
        assert!(segment.len() > 0 && segment.offset() % FILE_ALIGN == 0);
        done += segment.len();
        assert!(segment.len() % FILE_ALIGN == 0 || done == file.len);
        let into = &mut bytes[segment.offset() as usize..][..segment.padded_len() as usize];
        match *segment {
            Segment::Body { item, offset, len } => {
                let placed = &file.items[item];
                assert_eq!((offset, len), (placed.data_offset, placed.body_bytes));
                into.copy_from_slice(&memory.0[placed.index][..len as usize]);
            }
            Segment::Glue { .. } => file.glue(segment, memory, into).unwrap(),
        }
    }
    assert_eq!(done, file.len);
    assert!(bytes[file.len as usize..].iter().all(|&byte| byte == 0));
    bytes.truncate(file.len as usize);
    bytes
}

/// The same file, item by item.
fn expected(file: &FileLayout, memory: &Memory) -> Vec<u8> {
    let mut bytes = Vec::new();
    for item in &file.items {
        assert_eq!(item.offset, bytes.len() as u64, "items follow each other");
        let data = &memory.0[item.index];
        if let Some(tensor) = &item.tensor {
            tensor.head(crc32(data), &mut bytes);
            assert_eq!(item.data_offset, bytes.len() as u64);
            bytes.extend_from_slice(data);
            tensor.tail(crc32(data), &mut bytes);
        } else {
            bytes.extend_from_slice(data);
        }
        assert_eq!(item.end(), bytes.len() as u64);
    }
    bytes
}

fn check(items: &[ItemSpec], options: &LayoutOptions) -> Vec<FileLayout> {
    let memory = Memory::of(items);
    let files = plan_files(items, options).unwrap();
    let order: Vec<_> = files.iter().flat_map(|file| &file.items).map(|item| item.index).collect();
    assert_eq!(order, (0..items.len()).collect::<Vec<_>>(), "each item once, in order");
    for file in &files {
        assert!(!file.items.is_empty());
        assert!(file.len <= options.max_file_bytes || file.items.len() == 1);
        for item in &file.items {
            let is_tensor = item.tensor.is_some();
            let large = is_tensor && item.data_bytes >= options.large_bytes.max(FILE_ALIGN);
            let align = if large { FILE_ALIGN } else { SMALL_ALIGN };
            assert!(!is_tensor || item.data_bytes == 0 || item.data_offset % align == 0);
            let body = item.data_bytes / FILE_ALIGN * FILE_ALIGN;
            assert_eq!(item.body_bytes, if large { body } else { 0 });
        }
        assert!(written(file, &memory) == expected(file, &memory), "bytes differ\n{file}");
    }
    files
}

fn item() -> impl Strategy<Value = ItemSpec> {
    let dtype = proptest::sample::select(TorchDtype::ALL);
    let shape = prop_oneof![
        2 => proptest::collection::vec(0u64..5, 0..5),
        1 => (1u64..20_000).prop_map(|side| vec![side]),
        1 => (0u64..6).prop_map(|blocks| vec![blocks * 1024, 4]),
    ];
    prop_oneof![
        4 => (dtype, shape).prop_map(|(dtype, shape)| ItemSpec::Tensor { dtype, shape }),
        1 => (0u64..9000).prop_map(ItemSpec::Bytes),
    ]
}

fn options() -> impl Strategy<Value = LayoutOptions> {
    let files = (1usize..5, prop_oneof![Just(1u64), Just(20_000)]);
    let bytes = (10_000u64..2_000_000, 0u64..40_000, 0u64..30_000);
    (files, bytes).prop_map(|((files, min), (max, large, glue))| LayoutOptions {
        files,
        min_file_bytes: min,
        max_file_bytes: max,
        large_bytes: large,
        max_glue_bytes: glue,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_byte_is_written_once_and_right(
        items in proptest::collection::vec(item(), 0..25),
        options in options(),
    ) {
        check(&items, &options);
    }
}

fn floats(side: u64) -> ItemSpec {
    ItemSpec::Tensor { dtype: TorchDtype::Float32, shape: vec![side] }
}

#[test]
fn files_are_about_equal_and_not_made_for_little() {
    let items = vec![floats(1 << 18); 16];
    let options = LayoutOptions { files: 4, min_file_bytes: 4 << 20, ..Default::default() };
    let counts = |options: &LayoutOptions| {
        let files = plan_files(&items, options).unwrap();
        files.iter().map(|file| file.items.len()).collect::<Vec<_>>()
    };
    assert_eq!(counts(&options), [4, 4, 4, 4]);
    assert_eq!(counts(&LayoutOptions { files: 3, ..options }), [5, 6, 5]);
    assert_eq!(counts(&LayoutOptions { min_file_bytes: 8 << 20, ..options }), [8, 8]);
    let capped = LayoutOptions { max_file_bytes: 7 << 20, ..LayoutOptions::default() };
    assert_eq!(counts(&capped), [6, 6, 4]);
    assert!(plan_files(&[], &options).unwrap().is_empty());
}

#[test]
fn a_plan_can_be_read() {
    let items = [floats(4), floats(20_000), ItemSpec::Bytes(900)];
    let files = check(&items, &LayoutOptions::default());
    let text = files[0].to_string();
    let lines: Vec<_> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert_eq!(lines[1], ["0", "4096", "glue,", "2", "items", "start"]);
    assert_eq!(lines[2], ["4096", "81920", "body", "of", "item", "1"]);
    assert_eq!(lines[3][2..], ["glue,", "1", "items", "start"]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let huge = ItemSpec::Tensor { dtype: TorchDtype::Uint8, shape: vec![1 << 62] };
    let code = |items: &[ItemSpec]| {
        plan_files(items, &LayoutOptions { max_file_bytes: u64::MAX, ..Default::default() })
            .unwrap_err()
            .code()
    };
    assert_eq!(code(&[huge.clone(), huge]), forebay_error::Code::Overflow);
    assert_eq!(code(&[ItemSpec::Bytes(u64::MAX)]), forebay_error::Code::Overflow);
    let files = plan_files(&[floats(5)], &LayoutOptions::default()).unwrap();
    let mut short = [0; 10];
    let memory = Memory::of(&[floats(5)]);
    assert!(files[0].glue(&files[0].segments[0], &memory, &mut short).is_err());
}
